package sqlxrefill_test

import (
	"context"
	"database/sql/driver"
	"fmt"
	"testing"
	"time"

	"github.com/refill-go/refill/middleware/sqlxrefill"
)

type user struct {
	ID      int64
	Name    string
	Email   *string
	Score   float64
	Created time.Time
}

func users(n int) *source {
	t := &table{columns: []string{"id", "name", "email", "score", "created"}}
	for i := range n {
		t.rows = append(t.rows, []driver.Value{
			int64(i), "Jane Doe", []byte("jane.doe@example.com"), 1.5, time.Unix(1e9, 0).UTC(),
		})
	}
	return always(t)
}

const byID = "SELECT id, name, email, score, created FROM users WHERE id = $1"

// BenchmarkGet measures GetContext of sqlx ("sqlx") and GetContext of this package with a hit in L1 ("cached"). The
// fake database costs almost nothing, so "sqlx" is mostly the cost of scanning. "cached" includes the same scanning.
func BenchmarkGet(b *testing.B) {
	plain := users(1).open(b)
	ours := cachedOver(b, plain, sqlxrefill.Config{})
	ctx := context.Background()
	reading := func(get read) func(*testing.B) {
		return func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				var u user
				if err := get(ctx, &u, byID, 42); err != nil {
					b.Fatal(err)
				}
			}
		}
	}
	b.Run("sqlx", reading(plain.GetContext))
	b.Run("cached", reading(ours.GetContext))
	b.Run("cached-parallel", func(b *testing.B) {
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				var u user
				if err := ours.GetContext(ctx, &u, byID, 42); err != nil {
					b.Error(err)
				}
			}
		})
	})
}

func BenchmarkSelect(b *testing.B) {
	for _, n := range []int{10, 1000} {
		plain := users(n).open(b)
		ours := cachedOver(b, plain, sqlxrefill.Config{})
		ctx := context.Background()
		for name, sel := range map[string]read{"sqlx": plain.SelectContext, "cached": ours.SelectContext} {
			b.Run(fmt.Sprintf("%s-%d", name, n), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					var list []user
					if err := sel(ctx, &list, byID, 42); err != nil || len(list) != n {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
