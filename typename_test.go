package refill_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
)

type product struct{ ID int }

// Two types of two packages, or of two functions, can have the same name. The records of two such types look alike, so
// a Loader of one type would decode records of the other type. New must refuse the second of two Loaders with such
// types.
func TestTwoTypesWithOneName(t *testing.T) {
	type inner = product
	bubble(t, func(t *testing.T) {
		type product struct{ Name string }
		cfg := refill.Config{TTL: time.Minute, Shared: memory.New()}
		one, err := refill.New("thing", func(context.Context, string) (inner, error) { return inner{}, nil }, cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer one.Close()
		_, err = refill.New("thing", func(context.Context, string) (product, error) { return product{}, nil }, cfg)
		if !errors.Is(err, refill.ErrInvalid) {
			t.Errorf("got %v for a second type refill_test.product, want ErrInvalid", err)
		}
	})
}
