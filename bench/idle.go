package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/goredis"
	"github.com/refill-go/refill/internal/realtest"
)

const (
	idleLoaders = 1000
	idleAfter   = time.Second // longer than ten ticks, after which the coarse clock sleeps
)

// idleCases are the subjects of the suite idle.
var idleCases = []struct {
	name    string
	loaders int
	used    bool
}{
	{"1, never used", 1, false},
	{fmt.Sprintf("%d, never used", idleLoaders), idleLoaders, false},
	{fmt.Sprintf("%d, used once", idleLoaders), idleLoaders, true},
}

// idle measures what Loaders cost while no caller uses them.
func idle(ctx context.Context, b *bench) error {
	if !b.only.MatchString("refill") {
		return nil
	}
	t := &Table{Name: "idle", Title: fmt.Sprintf("Loaders over one store of Redis, TTL 1 min, while no caller uses them. "+
		"CPU is the share of one core that the whole process takes for %v: the Loaders, and the one subscription of the "+
		"store. A Loader that was used once holds one small value.", b.length), Columns: []Column{
		{Name: "KiB/Loader"}, {Name: "goroutines/Loader", Digits: 1}, {Name: "CPU", Unit: "%", Digits: 2},
	}}
	redis := realtest.StartRedis(b.stage)
	for round := range b.rounds {
		for _, c := range idleCases {
			b.progress("idle %d/%d: %s", round+1, b.rounds, c.name)
			if err := b.idleRound(ctx, t, redis, c.name, c.loaders, c.used); err != nil {
				return err
			}
		}
	}
	b.done(t)
	return nil
}

// idleRound takes one sample of each column.
func (b *bench) idleRound(
	ctx context.Context, t *Table, server *realtest.Redis, subject string, loaders int, used bool,
) (err error) {
	debug.FreeOSMemory() // otherwise the runtime gives back the memory of the last round during this one
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr(), ContextTimeoutEnabled: true})
	all := &idlers{conf: refill.Config{TTL: time.Minute, Shared: goredis.New(rdb)}}
	defer func() { err = errors.Join(err, all.close(), rdb.Close()) }()
	if err := all.open(ctx, 1, used); err != nil { // the first Loader starts the subscription of the store
		return err
	}
	if err := pause(ctx, idleAfter); err != nil {
		return err
	}
	heap, goroutines := heapBytes(), runtime.NumGoroutine()
	if err := all.open(ctx, loaders-1, used); err != nil {
		return err
	}
	if err := pause(ctx, idleAfter); err != nil {
		return err
	}
	if more := float64(loaders - 1); more > 0 {
		t.Add(subject, "KiB/Loader", (heapBytes()-heap)/1024/more)
		t.Add(subject, "goroutines/Loader", float64(runtime.NumGoroutine()-goroutines)/more)
	}
	cpu, began := cpuTime(), time.Now()
	if err := pause(ctx, b.length); err != nil {
		return err
	}
	t.Add(subject, "CPU", 100*(cpuTime()-cpu).Seconds()/time.Since(began).Seconds())
	return nil
}

// idlers are Loaders over one store.
type idlers struct {
	conf    refill.Config
	loaders []*refill.Loader[string]
}

// open adds n Loaders. If used is set, each loads a value.
func (i *idlers) open(ctx context.Context, n int, used bool) error {
	for range n {
		l, err := refill.New(fmt.Sprint("idle-", len(i.loaders)), func(context.Context, string) (string, error) {
			return smallValue, nil
		}, i.conf)
		if err != nil {
			return err
		}
		i.loaders = append(i.loaders, l)
		if used {
			if _, err := l.Get(ctx, "key"); err != nil {
				return err
			}
		}
	}
	return nil
}

func (i *idlers) close() error {
	var errs []error
	for _, l := range i.loaders {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}

// pause waits for d. It returns the error of ctx if ctx ends first.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
