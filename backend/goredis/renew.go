package goredis

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/refill-go/refill/driver"
)

// maxRenewals is how many leases are renewed in one pipeline.
const maxRenewals = 1024

// Renew implements driver.Store. The renewals go out in pipelines over the Store's own client: on a Ring one pipeline
// for each shard, on a Cluster one for each master. The pipelines of different servers run at the same time.
func (s *Store) Renew(ctx context.Context, ttl time.Duration, leases ...driver.Lease) (mine []bool, err error) {
	if len(leases) == 0 {
		return nil, nil
	}
	all := make([]invocation, len(leases))
	for i, l := range leases {
		all[i] = invocation{keys: s.keys(l.Key).fill(), args: []any{l.Token, millis(ttl)}}
	}
	return call(ctx, &s.renewals, "renew", func(ctx context.Context) ([]bool, error) {
		ctx, cancel := beforeEnd(ctx)
		defer cancel()
		mine, err := s.renewAll(ctx, all)
		if end := ended(ctx); err != nil && end != nil && !errors.Is(err, end) {
			err = fmt.Errorf("%w (%w)", end, err)
		}
		return mine, err
	})
}

// beforeEnd returns a ctx that ends when three quarters of the time of ctx have passed. If one server does not answer,
// Renew then still has time to return what the other servers have answered.
func beforeEnd(ctx context.Context) (context.Context, context.CancelFunc) {
	end, ok := ctx.Deadline()
	if !ok {
		return ctx, func() {}
	}
	return context.WithDeadline(ctx, end.Add(-time.Until(end)/4))
}

// renewAll runs lua/renew.lua for each lease. If some renewals fail, it still returns the results of the others.
func (s *Store) renewAll(ctx context.Context, all []invocation) ([]bool, error) {
	// lots has the leases to renew over each own client, as indices of all. The key nil stands for the user's client.
	lots := make(map[client][]int)
	own := s.pubsub.own.Load()
	for i, v := range all {
		c := own.forKey(v.keys[0])
		lots[c] = append(lots[c], i)
	}
	var (
		mine = make([]bool, len(all))
		mu   sync.Mutex // guards errs
		errs []error
		wg   sync.WaitGroup
	)
	for c, lot := range lots {
		wg.Go(func() {
			for len(lot) > 0 {
				n := min(len(lot), maxRenewals)
				if err := s.renewLot(ctx, c, own, all, lot[:n], mine); err != nil {
					mu.Lock()
					errs = append(errs, err)
					mu.Unlock()
				}
				lot = lot[n:]
			}
		})
	}
	wg.Wait()
	return mine, errors.Join(errs...)
}

// renewLot renews the leases of one pipeline. If a renewal fails on the own client before ctx ends, renewLot tries it
// again on the user's client, as onOwnClient does.
func (s *Store) renewLot(
	ctx context.Context, c client, own *ownClient, all []invocation, lot []int, mine []bool,
) error {
	if c != nil {
		left, err := s.renewOn(ctx, c, all, lot, mine)
		if err == nil {
			return nil
		}
		if c, ok := own.client.(reloader); ok {
			c.ReloadState(ctx)
		}
		if ended(ctx) != nil {
			return err
		}
		lot = left
	}
	_, err := s.renewOn(ctx, s.client, all, lot, mine)
	return err
}

// renewOn renews the leases of lot over one client. It returns the leases whose renewal failed, as indices of all.
func (s *Store) renewOn(
	ctx context.Context, c client, all []invocation, lot []int, mine []bool,
) (failed []int, err error) {
	some := make([]invocation, len(lot))
	for j, i := range lot {
		some[j] = all[i]
	}
	replies, err := renewScript.runEach(ctx, &s.known, c, some)
	for j, i := range lot {
		switch replies[j] {
		case int64(1):
			mine[i] = true
		case int64(0):
		case nil:
			failed = append(failed, i)
		default:
			failed, err = append(failed, i), errReply
		}
	}
	return failed, err
}
