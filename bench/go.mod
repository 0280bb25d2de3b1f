module github.com/refill-go/refill/bench

go 1.25.0

replace (
	github.com/refill-go/refill => ../
	github.com/refill-go/refill/codec => ../codec
	github.com/refill-go/refill/internal/realtest => ../internal/realtest
)

require (
	github.com/HdrHistogram/hdrhistogram-go v1.4.0
	github.com/dgraph-io/ristretto/v2 v2.4.0
	github.com/dtm-labs/rockscache v0.1.1
	github.com/eko/gocache/lib/v4 v4.2.4
	github.com/eko/gocache/store/go_cache/v4 v4.2.4
	github.com/eko/gocache/store/redis/v4 v4.2.6
	github.com/go-chi/stampede v0.9.1
	github.com/go-redis/cache/v9 v9.0.0
	github.com/goware/cachestore2 v0.12.2
	github.com/hashicorp/golang-lru/v2 v2.0.7
	github.com/maypok86/otter/v2 v2.4.0
	github.com/mgtv-tech/jetcache-go v1.2.6
	github.com/patrickmn/go-cache v2.1.0+incompatible
	github.com/puzpuzpuz/xsync/v4 v4.5.0
	github.com/redis/go-redis/v9 v9.17.3
	github.com/redis/rueidis v1.0.76
	github.com/redis/rueidis/rueidisaside v1.0.73
	github.com/refill-go/refill v0.0.0-00010101000000-000000000000
	github.com/refill-go/refill/codec v0.0.0-00010101000000-000000000000
	github.com/refill-go/refill/internal/realtest v0.0.0-00010101000000-000000000000
	github.com/samber/hot v0.13.0
	github.com/viccon/sturdyc v1.1.5
	golang.org/x/sync v0.22.0
)

require (
	github.com/DmitriyVTitov/size v1.5.0 // indirect
	github.com/beorn7/perks v1.0.1 // indirect
	github.com/bytedance/gopkg v0.1.3 // indirect
	github.com/bytedance/sonic v1.15.2 // indirect
	github.com/bytedance/sonic/loader v0.5.1 // indirect
	github.com/cespare/xxhash/v2 v2.3.0 // indirect
	github.com/cloudwego/base64x v0.1.6 // indirect
	github.com/coocood/freecache v1.2.4 // indirect
	github.com/dgryski/go-rendezvous v0.0.0-20200823014737-9f7001d12a5f // indirect
	github.com/dustin/go-humanize v1.0.1 // indirect
	github.com/fxamacker/cbor/v2 v2.9.6 // indirect
	github.com/google/uuid v1.6.0 // indirect
	github.com/goware/singleflight v0.3.0 // indirect
	github.com/klauspost/compress v1.20.3 // indirect
	github.com/klauspost/cpuid/v2 v2.2.10 // indirect
	github.com/lithammer/shortuuid v3.0.0+incompatible // indirect
	github.com/munnerz/goautoneg v0.0.0-20191010083416-a7dc8b61c822 // indirect
	github.com/prometheus/client_golang v1.23.2 // indirect
	github.com/prometheus/client_model v0.6.2 // indirect
	github.com/prometheus/common v0.67.4 // indirect
	github.com/prometheus/procfs v0.19.2 // indirect
	github.com/samber/go-singleflightx v0.3.2 // indirect
	github.com/twitchyliquid64/golang-asm v0.15.1 // indirect
	github.com/vmihailenco/go-tinylfu v0.2.2 // indirect
	github.com/vmihailenco/msgpack/v5 v5.4.1 // indirect
	github.com/vmihailenco/tagparser/v2 v2.0.0 // indirect
	github.com/x448/float16 v0.8.4 // indirect
	github.com/zeebo/xxh3 v1.0.2 // indirect
	go.yaml.in/yaml/v2 v2.4.3 // indirect
	golang.org/x/arch v0.0.0-20210923205945-b76863e36670 // indirect
	golang.org/x/exp v0.0.0-20251209150349-8475f28825e9 // indirect
	golang.org/x/sys v0.46.0 // indirect
	google.golang.org/protobuf v1.36.10 // indirect
)
