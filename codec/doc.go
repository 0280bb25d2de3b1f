// Package codec has codecs for refill.Config.Codec beside the default of that package: [CBOR], which is about twice as fast
// as JSON, and [Compress], which packs large values of any codec.
//
//	refill.Config{TTL: time.Minute, Codec: codec.CBOR}                                // structs, quicker
//	refill.Config{TTL: time.Minute, Codec: codec.Compress(nil, 4<<10)}                // large JSON, HTTP bodies, pages
//	refill.Config{TTL: time.Minute, Codec: codec.Compress(codec.CBOR, 4<<10)}         // large structs
//
// # Which one
//
// Stay with the default while nothing hurts: JSON can be read with redis-cli, and a []byte or string is stored as it is.
// A value is encoded once per load and decoded once per node and LocalTTL, never on a hit, so a codec is seldom what makes a
// service slow. Take CBOR where profiles show decoding, or where values hold what JSON cannot: NaN and infinities, large
// integers in an interface{}, strings that are not UTF-8. Take Compress where the memory of Redis or the network costs more
// than some microseconds per value: text above 10 KiB shrinks to a third. docs/codecs.md has measurements.
//
// # Changing it
//
// The name of the codec stands in every record. Nodes with different codecs that share a store take each other's records
// for misses (refill.EventBadRecord), never for errors; while a deployment rolls they replace each other's records, so the
// database sees more loads until it is over. The size above which Compress packs is not part of the name, and may change at
// any time.
package codec
