package refill_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/refill-go/refill"
)

// BenchmarkHit measures a Get that L1 answers. The folder bench compares refill with other libraries.
func BenchmarkHit(b *testing.B) {
	for _, keys := range []int{1, 1000} {
		b.Run(fmt.Sprintf("keys=%d", keys), func(b *testing.B) {
			l, err := refill.New("thing", func(_ context.Context, key string) (string, error) { return key, nil },
				refill.Config{TTL: time.Hour})
			if err != nil {
				b.Fatal(err)
			}
			defer l.Close()
			names := make([]string, keys)
			for i := range names {
				names[i] = fmt.Sprint("product:", i)
				if _, err := l.Get(b.Context(), names[i]); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				ctx := context.Background()
				for i := 0; pb.Next(); i++ {
					if _, err := l.Get(ctx, names[i%keys]); err != nil {
						b.Error(err)
					}
				}
			})
		})
	}
}

// BenchmarkMiss measures a Get of a new key, with a load that takes no time. Config.Shared is not set, so the Loader
// has a store in memory of its own. The result is what the refill itself costs.
func BenchmarkMiss(b *testing.B) {
	l, err := refill.New("thing", func(_ context.Context, key string) (page, error) { return page{Title: key}, nil },
		refill.Config{TTL: time.Hour})
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if _, err := l.Get(b.Context(), fmt.Sprint("product:", i)); err != nil {
			b.Fatal(err)
		}
	}
}
