// Package peers gives one interface to many ways to cache in front of a database: refill, its peers, caches written by
// hand, and raw operations that no cache can beat. Each library is set up as its README recommends. All peers get the
// same Settings.
package peers

import (
	"context"
	"time"
)

// Product is the cached value: some 1 KiB of JSON.
type Product struct {
	ID          string    `json:"id"`
	Seq         int64     `json:"seq"`   // number of the load that made it
	Began       int64     `json:"began"` // when the load began, µs since 1970
	Ended       int64     `json:"ended"` // when the load ended, µs since 1970
	Name        string    `json:"name"`
	Description string    `json:"description"`
	Price       float64   `json:"price"`
	Stock       int       `json:"stock"`
	Tags        []string  `json:"tags"`
	Ratings     []float64 `json:"ratings"`
}

// Load is the database query behind a cache.
type Load func(ctx context.Context, key string) (*Product, error)

// Settings are what a peer has to do: what to load, and how long to keep it.
type Settings struct {
	Load     Load
	TTL      time.Duration // fresh for this long
	StaleFor time.Duration // peers with Stale: how long a value is served after TTL; 0 = not at all
	Entries  int           // how many entries have to fit into L1
	NoLocal  bool          // no L1; obeyed by peers that are Shared and Local, and can do without L1
	Redis    string        // "host:port", for peers that are Shared; several, with commas: a Cluster (only refill)
	Jitter   float64       // only refill uses it
}

// A Cache answers Gets. Callers share its values and must not change them.
type Cache interface {
	Get(ctx context.Context, key string) (*Product, error)
	Close() error
}

// An Invalidator can drop a value after the database has changed.
type Invalidator interface {
	Invalidate(ctx context.Context, key string) error
}

// Peer is one way to cache.
type Peer struct {
	Name   string
	Module string // bench prints the version of this module with the figures
	About  string // one line: how the peer is set up
	Shared bool   // uses Redis
	Local  bool   // answers from the memory of the process
	Stale  bool   // obeys Settings.StaleFor
	Locks  bool   // at most one load at a time in the whole fleet
	Limit  bool   // a raw operation, not a cache for users
	Open   func(Settings) (Cache, error)
}
