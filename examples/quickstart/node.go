package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/jmoiron/sqlx"
	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/goredis"
)

// product is what the pages show, and what is cached.
type product struct {
	ID    int    `db:"id" json:"id"`
	Name  string `db:"name" json:"name"`
	Cents int    `db:"cents" json:"cents"`
}

// loadProduct reads a product from the database. The nodes without refill call the same function.
func loadProduct(ctx context.Context, db *sqlx.DB, id string) (p product, err error) {
	err = db.GetContext(ctx, &p, db.Rebind(`SELECT id, name, cents FROM refill_quickstart WHERE id = ?`), id)
	if errors.Is(err, sql.ErrNoRows) {
		err = fmt.Errorf("product %s: %w", id, refill.ErrNotFound) // refill caches this absence
	}
	return p, err
}

// node is one process of a fleet. To use refill in your program, copy node, newNode and ServeHTTP.
type node struct {
	products *refill.Loader[product]
}

func newNode(rdb redis.UniversalClient, db *sqlx.DB, ttl time.Duration, onEvent func(refill.Event)) (*node, error) {
	load := func(ctx context.Context, id string) (product, error) { return loadProduct(ctx, db, id) }

	products, err := refill.New("quickstart-product", load, refill.Config{
		TTL:      ttl,              // fresh for this long
		StaleFor: 10 * time.Minute, // then served stale, while one node of the fleet asks the database again
		Shared:   goredis.New(rdb), // one per process
		OnEvent:  onEvent,          // counts the outcomes for this program; optional
	})
	return &node{products}, err
}

func (n *node) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p, err := n.products.Get(r.Context(), r.PathValue("id"))
	answer(w, p, err)
}

// answer writes the result of a Get. Visitors do not get the text of an error, because it can name keys, nodes and SQL.
func answer(w http.ResponseWriter, p product, err error) {
	switch {
	case errors.Is(err, refill.ErrNotFound):
		http.Error(w, "not found", http.StatusNotFound)
	case err != nil:
		http.Error(w, "try again later", http.StatusServiceUnavailable)
	default:
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(p) // Encode fails only if the client has left
	}
}
