package simulation

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/refill-go/refill"
)

// This file contains the database of a schedule. The database has one row per key, and the row has a version number.
// The load functions read the database, and fail as the schedule says.

// value is the value that a load returns. If a load finds no row, it returns ErrNotFound with the value as text.
type value struct {
	Key      int
	Version  int
	Began    time.Duration // when the load function was called
	Load     int           // number of the load
	TTL      time.Duration // given to SetTTL; 0 = SetTTL was not called
	StaleFor time.Duration // given to SetStaleFor; 0 = SetStaleFor was not called
	NoStore  bool          // the load called NoStore
}

func (v value) String() string {
	b, _ := json.Marshal(v)
	return string(b)
}

// parse reads a value from the payload of a record, or from the text of an ErrNotFound.
func parse(text string) (v value, ok bool) {
	at := strings.IndexByte(text, '{')
	return v, at >= 0 && json.Unmarshal([]byte(text[at:]), &v) == nil
}

// load is one call of a load function, or one key of a call of a bulk load function. end is -1 until the call returns.
type load struct {
	key, node  int
	life       *life // the Loader that made the call
	call       int   // number of the call; all keys of a bulk load have the same number
	begin, end time.Duration
	version    int
	ok         bool
	left       bool  // the ctx of the load had ended when the function returned
	fault      fault // what was wrong with the database, or ""
	value      value
}

// database is the database that the load functions of all nodes read.
type database struct {
	*world
	mu       sync.Mutex // guards the fields below
	versions [keys]int
	loads    []*load
	calls    int
	rand     [nodes]*rand.Rand
	release  chan struct{} // closed at the end of the schedule, so that load functions that hang return
}

func (w *world) newDatabase() *database {
	d := &database{world: w, release: make(chan struct{})}
	for n := range nodes {
		d.rand[n] = random(w.seed, 20+n)
	}
	return d
}

func (d *database) version(key int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.versions[key]
}

// write gives the rows of the keys a new version.
func (d *database) write(changed ...int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, k := range changed {
		d.versions[k]++
	}
}

// plan says how one call of a load function will behave.
type plan struct {
	took  time.Duration
	fault fault
	until time.Duration // when the fault ends
	odd   int           // a random number from 0 to 11, which selects what Fill settings the load uses
}

// begin notes a call of the load function and draws its plan. begin reads the versions of the rows at once, because a
// query sees the rows as they are when the query starts.
func (d *database) begin(l *life, asked []int) ([]*load, plan) {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.rand[l.node]
	p := plan{took: between(r, ms, maxLoad), odd: r.IntN(12)}
	ttl := between(r, 50*ms, 4*time.Second)
	for _, k := range asked {
		if w := d.active(d.now(), l.node, k, failing, panics, hangs, deaf, slowLoad); w != nil {
			p.fault, p.until = w.fault, w.to
		}
	}
	if w := d.active(d.now(), l.node, anyKey, frozen); w != nil && p.fault == "" {
		p.fault, p.until = frozen, w.to
	}
	if p.fault == slowLoad {
		p.took = between(r, d.cfg.LoadTimeout/2, d.cfg.LoadTimeout*3/2)
	}
	d.calls++
	var begun []*load
	for _, k := range asked {
		b := &load{
			key: k, node: l.node, life: l, call: d.calls, begin: d.now(), end: -1, version: d.versions[k], fault: p.fault,
		}
		b.value = value{Key: k, Version: b.version, Began: b.begin, Load: len(d.loads)}
		switch {
		case !d.strange:
		case p.odd == 0:
			b.value.TTL = ttl
		case p.odd == 1:
			b.value.StaleFor = ttl
		case p.odd == 2:
			b.value.NoStore = true
		}
		d.loads = append(d.loads, b)
		begun = append(begun, b)
	}
	return begun, p
}

// end notes that a call of a load function has returned. left says that its ctx had ended.
func (d *database) end(begun []*load, err error, left bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, b := range begun {
		b.end, b.ok, b.left = d.now(), err == nil && !left, left
	}
}

var errDatabase = errors.New("simulation: no connection to the database")

// run is the load function of the Loader l, for the keys asked.
func (d *database) run(ctx context.Context, l *life, asked []int) (begun []*load, err error) {
	begun, p := d.begin(l, asked)
	d.log(l.node, "load %v v%d call %d %s", asked, begun[0].version, begun[0].call, p.fault)
	defer func() {
		left := ctx.Err() != nil
		d.end(begun, err, left)
		d.log(l.node, "load %v call %d ended: %v", asked, begun[0].call, err)
	}()
	d.set(ctx, begun)
	err = errDatabase // the deferred function notes this error for a panic or a Goexit
	switch p.fault {
	case hangs:
		d.wait(ctx, 10*d.cfg.LoadTimeout)
		return begun, ctx.Err()
	case deaf:
		d.wait(background, p.until-d.now()+min(10*p.took, deafBy))
		return begun, errDatabase
	case frozen:
		d.wait(background, p.until-d.now())
	}
	d.wait(ctx, p.took)
	switch p.fault {
	case failing:
		return begun, errDatabase
	case panics:
		if p.odd%2 == 0 {
			runtime.Goexit()
		}
		panic(errDatabase)
	}
	return begun, ctx.Err()
}

// set calls SetTTL, SetStaleFor, NoStore and Tag as the values of the loads say.
func (d *database) set(ctx context.Context, begun []*load) {
	for _, b := range begun {
		f := refill.FillFrom(ctx).For(keyName(b.key))
		if b.value.TTL > 0 {
			f.SetTTL(b.value.TTL)
		}
		if b.value.StaleFor > 0 {
			f.SetStaleFor(b.value.StaleFor)
		}
		if b.value.NoStore {
			f.NoStore()
		}
		if d.tags {
			f.Tag(tagName(b.key))
		}
	}
}

// wait returns after the time long, or when ctx ends, or when the schedule ends.
func (d *database) wait(ctx context.Context, long time.Duration) {
	timer := time.NewTimer(long)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	case <-d.release:
	}
}

// absent reports whether a row with this version does not exist: a load then returns ErrNotFound.
func (d *database) absent(version int) bool { return d.strange && version%4 == 1 }

// one returns the load function of the Loader l.
func (d *database) one(l *life) func(context.Context, string) (value, error) {
	return func(ctx context.Context, key string) (value, error) {
		begun, err := d.run(ctx, l, []int{keyIndex(":" + key)})
		if err != nil {
			return value{}, err
		}
		if v := begun[0].value; d.absent(v.Version) {
			return value{}, fmt.Errorf("%w: %v", refill.ErrNotFound, v)
		}
		return begun[0].value, nil
	}
}

// many returns the bulk load function of the Loader l.
func (d *database) many(l *life) func(context.Context, []string) (map[string]value, error) {
	return func(ctx context.Context, names []string) (map[string]value, error) {
		var asked []int
		for _, name := range names {
			asked = append(asked, keyIndex(":"+name))
		}
		begun, err := d.run(ctx, l, asked)
		if err != nil {
			return nil, err
		}
		values := map[string]value{}
		for _, b := range begun {
			values[keyName(b.key)] = b.value
		}
		return values, nil
	}
}
