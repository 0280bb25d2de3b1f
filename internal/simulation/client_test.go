package simulation

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/refill-go/refill"
)

// This file contains the clients. They call the nodes, and note each call and its result for the checker.

// get is one Get, Peek or Refresh with its result, or one key of a GetMany with its result.
type get struct {
	op         string
	life       *life
	client     int
	key        int
	begin, end time.Duration
	leave      time.Duration // when the ctx ends, perhaps after the call; 0 = never
	cancel     bool          // the ctx ends by a cancellation, not by a deadline
	outcome    refill.Outcome
	noStale    bool // GetOptions.NoStale was set for the call
	value      value
	has        bool // the call returned a value or an absence, which is in value
	err        error
}

// change is one Invalidate, Expire, InvalidateTag or ExpireTag.
type change struct {
	life       *life
	keys       []int
	begin, end time.Duration
	version    [keys]int // version of each key in the database when the call began
	tags       bool
	expire     bool
	err        error
}

// client is client number c. It makes random calls of random nodes until the schedule is over.
func (w *world) client(c int) {
	r := random(w.seed, 100+c)
	for {
		pause := between(r, 0, 800*ms)
		if r.IntN(3) == 0 { // call at the next full half second, when other clients call as well
			pause = 500*ms - w.now()%(500*ms)
		}
		time.Sleep(pause)
		if w.now() >= w.length {
			return
		}
		w.act(r, c, w.node[r.IntN(nodes)].Load())
	}
}

// act makes one random call of the Loader l.
func (w *world) act(r *rand.Rand, c int, l *life) {
	g := get{life: l, client: c, key: pick(r, 0, 0, 0, 1, 1, 2)}
	ctx, stop := w.context(r, &g)
	defer stop()
	switch n := r.IntN(100); {
	case n < 45:
		w.getResult(ctx, g, refill.GetOptions[value]{})
	case n < 55:
		g.noStale = true
		w.getResult(ctx, g, refill.GetOptions[value]{NoStale: true})
	case n < 58:
		w.getResult(ctx, g, refill.GetOptions[value]{Refresh: true})
	case n < 63:
		w.get(ctx, g, func() (value, error) { return l.Get(ctx, keyName(g.key)) })
	case n < 66:
		w.get(ctx, g, func() (value, error) { return l.GetWith(ctx, keyName(g.key), w.db.one(l)) })
	case n < 74:
		w.getMany(ctx, g)
	case n < 77:
		w.refresh(ctx, g)
	case n < 80:
		w.peek(ctx, g)
	case n < 84: // a write without an invalidation: the next load reads a newer version than the cached version
		w.log(l.node, "client %d writes key %d", c, g.key)
		w.db.write(g.key)
	default:
		w.change(ctx, r, l)
	}
}

// context draws the ctx of a call: with a deadline, with a cancellation, or without an end. It notes the end in g.
func (w *world) context(r *rand.Rand, g *get) (context.Context, context.CancelFunc) {
	d := between(r, 5*ms, time.Second)
	switch r.IntN(6) {
	case 0:
		g.leave = w.now() + d
		return context.WithTimeout(context.Background(), d)
	case 1:
		g.leave, g.cancel = w.now()+d, true
		ctx, cancel := context.WithCancel(context.Background())
		timer := time.AfterFunc(d, cancel)
		return ctx, func() { timer.Stop(); cancel() }
	}
	return context.Background(), func() {}
}

// note adds the finished call g to the calls that verify checks.
func (w *world) note(g get) {
	g.end = w.now()
	if g.err != nil && errors.Is(g.err, refill.ErrNotFound) {
		g.value, g.has = parse(g.err.Error())
	}
	w.log(g.life.node, "client %d %s key %d since %v: %v v%d began %v load %d, %v",
		g.client, g.op, g.key, g.begin, g.outcome, g.value.Version, g.value.Began, g.value.Load, g.err)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.calls = append(w.calls, &g)
}

func (w *world) getResult(ctx context.Context, g get, o refill.GetOptions[value]) {
	if g.op = "get-result"; o.Refresh {
		g.op = "refresh-result"
	}
	g.begin = w.now()
	result, err := g.life.GetResultWith(ctx, keyName(g.key), o)
	g.value, g.err, g.outcome, g.has = result.Value, err, result.Outcome, err == nil
	w.note(g)
}

func (w *world) get(ctx context.Context, g get, do func() (value, error)) {
	g.op, g.begin = "get", w.now()
	g.value, g.err = do()
	g.has = g.err == nil
	w.note(g)
}

func (w *world) getMany(ctx context.Context, g get) {
	g.op, g.begin = "get-many", w.now()
	var names []string
	for k := range keys {
		names = append(names, keyName(k))
	}
	values, err := g.life.GetMany(ctx, names)
	var errs *refill.KeyErrors
	for k := range keys {
		g.key, g.err = k, err
		if errors.As(err, &errs) {
			g.err = errs.Errs[keyName(k)]
		}
		g.value, g.has = values[keyName(k)]
		w.note(g)
	}
}

func (w *world) refresh(ctx context.Context, g get) {
	g.op, g.begin = "refresh", w.now()
	g.err = g.life.Refresh(ctx, keyName(g.key))
	w.note(g)
}

func (w *world) peek(ctx context.Context, g get) {
	g.op, g.begin = "peek", w.now()
	result, ok := g.life.Peek(ctx, keyName(g.key))
	g.value, g.outcome, g.has = result.Value, result.Outcome, ok
	w.note(g)
}

// change writes to the database in four of five cases. It then invalidates or expires the keys, or a tag of the keys.
func (w *world) change(ctx context.Context, r *rand.Rand, l *life) {
	c := &change{life: l, keys: []int{r.IntN(keys)}, expire: r.IntN(3) == 0}
	if r.IntN(4) == 0 {
		c.keys = []int{0, 1, 2}
	}
	tags := w.allTags(c.keys[0])
	if len(tags) > 0 && r.IntN(2) == 0 {
		c.tags, c.keys = true, nil
		tags = []string{pick(r, tags...)}
		for _, full := range keysOf([]string{":" + tags[0]}) {
			c.keys = append(c.keys, keyIndex(full))
		}
	}
	if r.IntN(5) > 0 {
		w.db.write(c.keys...)
	}
	for k := range keys {
		c.version[k] = w.db.version(k)
	}
	var names []string
	for _, k := range c.keys {
		names = append(names, keyName(k))
	}
	c.begin = w.now()
	w.log(l.node, "change of %v to %v begins, tags %v, expire %v", c.keys, c.version, c.tags, c.expire)
	switch {
	case c.tags && c.expire:
		c.err = l.ExpireTag(ctx, tags...)
	case c.tags:
		c.err = l.InvalidateTag(ctx, tags...)
	case c.expire:
		c.err = l.Expire(ctx, names...)
	default:
		c.err = l.Invalidate(ctx, names...)
	}
	c.end = w.now()
	w.log(l.node, "change of %v to %v since %v: %v", c.keys, c.version, c.begin, c.err)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.changes = append(w.changes, c)
}
