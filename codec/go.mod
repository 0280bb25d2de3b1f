module github.com/refill-go/refill/codec

go 1.25.0

replace github.com/refill-go/refill => ../

require (
	github.com/fxamacker/cbor/v2 v2.9.6
	github.com/klauspost/compress v1.20.3
	github.com/refill-go/refill v0.0.0-00010101000000-000000000000
)

require (
	github.com/cespare/xxhash/v2 v2.3.0 // indirect
	github.com/dgraph-io/ristretto/v2 v2.4.0 // indirect
	github.com/dustin/go-humanize v1.0.1 // indirect
	github.com/x448/float16 v0.8.4 // indirect
	golang.org/x/sync v0.1.0 // indirect
	golang.org/x/sys v0.36.0 // indirect
)
