package main

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"github.com/jmoiron/sqlx"
	"github.com/redis/go-redis/v9"
)

// plainNode is a node without refill, with the usual cache-aside code. The code is correct, but it stampedes. After an
// entry has expired, every request runs its own query until the first query has returned.
type plainNode struct {
	rdb   redis.UniversalClient
	db    *sqlx.DB
	ttl   time.Duration
	tally *tally
}

func (n *plainNode) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p, err := n.get(r.Context(), r.PathValue("id"))
	answer(w, p, err)
}

func (n *plainNode) get(ctx context.Context, id string) (p product, err error) {
	if cached, err := n.rdb.Get(ctx, plainKey(id)).Bytes(); err == nil && json.Unmarshal(cached, &p) == nil {
		n.tally.fresh.Add(1)
		return p, nil
	}
	if p, err = loadProduct(ctx, n.db, id); err != nil {
		return p, err
	}
	n.tally.waited.Add(1)
	if b, err := json.Marshal(p); err == nil {
		n.rdb.Set(ctx, plainKey(id), b, n.ttl) // an error is ignored: the next request tries again
	}
	return p, nil
}

func plainKey(id string) string { return "quickstart:plain:" + id }
