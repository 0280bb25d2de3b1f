package main

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/refill-go/refill/bench/peers"
)

// getter is a Cache that only has Get.
type getter func(key string)

func (g getter) Get(_ context.Context, key string) (*peers.Product, error) {
	g(key)
	return nil, nil
}

func (getter) Close() error { return nil }

// The Get of the first key returns only when all other Gets have returned. If the goroutines had keys of their own, the
// goroutine of the first key would wait for keys that only this goroutine can request.
func TestNoGoroutineWaitsForTheKeysOfAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		keys := names(10)
		others := make(chan string, len(keys))
		r := &rig{t: t, Cache: getter(func(key string) {
			if key != keys[0] {
				others <- key
				return
			}
			for range len(keys) - 1 {
				<-others
			}
		})}
		if err := r.each(t.Context(), keys, 2); err != nil {
			t.Fatal(err)
		}
	})
}
