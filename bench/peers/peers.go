// Package peers gives one interface to every way to keep a cache in front of a database: refill, its peers, what people
// write by hand, and the raw parts that bound what any of them can reach. Each is set up as its README says, for the
// same job.
package peers

import (
	"context"
	"time"
)

// Product is what all of them cache: some 1 KiB of JSON.
type Product struct {
	ID          string    `json:"id"`
	Seq         int64     `json:"seq"`   // which load made it
	Began       int64     `json:"began"` // when that load began, µs since 1970
	Ended       int64     `json:"ended"` // and when it ended
	Name        string    `json:"name"`
	Description string    `json:"description"`
	Price       float64   `json:"price"`
	Stock       int       `json:"stock"`
	Tags        []string  `json:"tags"`
	Ratings     []float64 `json:"ratings"`
}

// Load is the database query behind a cache.
type Load func(ctx context.Context, key string) (*Product, error)

// Settings are the job.
type Settings struct {
	Load     Load
	TTL      time.Duration // fresh for this long
	StaleFor time.Duration // then served while it is refreshed, by those that can; 0 = all callers wait
	Entries  int           // what has to fit into L1
	NoLocal  bool          // no L1, for those with two levels that can do without
	Redis    string        // "host:port"; those that are Shared need it, the others ignore it

	// Only refill uses Jitter. Only refill takes more than one "host:port" in Redis, with commas, for a Cluster.
	Jitter float64
}

// A Cache answers Gets. Its values are shared and read-only.
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
	Module string // its version is printed with the figures
	About  string // one line: how it is set up
	Shared bool   // uses Redis
	Local  bool   // answers from its own memory
	Stale  bool   // obeys Settings.StaleFor
	Locks  bool   // at most one load at a time in the whole fleet
	Limit  bool   // a raw part that does not load: Get returns what Put, or the first Get, left there
	Open   func(Settings) (Cache, error)
}
