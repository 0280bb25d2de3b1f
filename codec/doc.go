// Package codec has more codecs for refill.Config.Codec. [CBOR] is about twice as fast as JSON. [Compress] compresses
// large values of any codec.
//
//	refill.Config{TTL: time.Minute, Codec: codec.CBOR}                                // structs, quicker
//	refill.Config{TTL: time.Minute, Codec: codec.Compress(nil, 4<<10)}                // large JSON, HTTP bodies, pages
//	refill.Config{TTL: time.Minute, Codec: codec.Compress(codec.CBOR, 4<<10)}         // large structs
//
// # Which one
//
// Keep the default of package refill unless it causes a problem. You can read JSON with redis-cli, and a []byte or
// string is stored as it is. A value is encoded once per load and decoded once per node and LocalTTL, never on a hit.
// So a codec seldom makes a service slow. Use CBOR if decoding shows in profiles. Also use CBOR if values hold data
// that JSON cannot represent: NaN and infinities, large integers in an interface{}, strings that are not UTF-8. Use
// Compress if the memory of Redis or the network costs more than some microseconds per value. Text above 10 KiB
// shrinks to a third. docs/codecs.md has measurements.
//
// # Changing the codec
//
// Every record holds the name of its codec. If nodes with different codecs share a store, they treat each other's
// records as misses (refill.EventBadRecord), never as errors. During a rolling deployment they replace each other's
// records, so the database sees more loads until the deployment is complete. The size above which Compress compresses
// is not part of the name, so you may change it at any time.
package codec
