package main

import (
	"maps"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/refill-go/refill/bench/peers"
	"github.com/refill-go/refill/internal/realtest"
)

// CI runs the tests of this file. The tests check numbers of allocations and of commands, because these numbers are the
// same on every machine.

// refillRig opens refill on a new Redis.
func refillRig(t *testing.T, s peers.Settings) (*rig, peers.Peer, peers.Settings) {
	t.Helper()
	p := peers.All()[0]
	if p.Name != "refill" {
		t.Fatalf("the first peer is %q", p.Name)
	}
	s.TTL, s.Entries = time.Hour, 10_000
	r, err := openRig(t, realtest.StartRedis(t), p, s, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r, p, s
}

func TestAHitInL1AllocatesNothing(t *testing.T) {
	r, _, _ := refillRig(t, peers.Settings{})
	keys := names(100)
	if missing, err := r.warm(t.Context(), keys, 8); err != nil || missing != 0 {
		t.Fatalf("%v of the keys are not in L1, %v", missing, err)
	}
	i := 0
	allocs := testing.AllocsPerRun(10_000, func() {
		if _, err := r.Get(t.Context(), keys[i%len(keys)]); err != nil {
			t.Fatal(err)
		}
		i++
	})
	if allocs != 0 {
		t.Errorf("%v allocations in a hit, want none", allocs)
	}
}

func TestAHitInRedisIsOneGet(t *testing.T) {
	r, p, s := refillRig(t, peers.Settings{NoLocal: true})
	keys := names(500)
	if err := r.each(t.Context(), keys, 1); err != nil {
		t.Fatal(err)
	}
	r.quiet()
	other, err := r.again(p, s)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := other.each(t.Context(), keys[:1], 1); err != nil { // the first Get of a Loader also reads the clock of Redis
		t.Fatal(err)
	}
	other.quiet()
	other.reset()
	if err := other.each(t.Context(), keys, 1); err != nil {
		t.Fatal(err)
	}
	wantWork(t, other, 0, map[string]int64{"get": 500})
}

// A miss of a key that no other caller requests costs two scripts. A Loader that does not expect misses also sends a
// GET before these scripts. A Loader expects misses if most of its recent refills were misses. The test makes 89
// further misses, which is more than enough. After that the Loader must send no GET.
func TestALoneMiss(t *testing.T) {
	r, _, _ := refillRig(t, peers.Settings{})
	keys := names(511)
	if err := r.each(t.Context(), keys[:1], 1); err != nil {
		t.Fatal(err)
	}
	load := func(keys []string, more map[string]int64) {
		t.Helper()
		r.quiet()
		r.reset()
		if err := r.each(t.Context(), keys, 1); err != nil {
			t.Fatal(err)
		}
		r.quiet()
		want := map[string]int64{"evalsha": 2, "mget": 2, "set": 3, "time": 1, "del": 1}
		maps.Copy(want, more)
		for name := range want {
			want[name] *= int64(len(keys))
		}
		wantWork(t, r, int64(len(keys)), want)
	}
	load(keys[1:11], map[string]int64{"get": 1})
	if err := r.each(t.Context(), names(600)[511:], 1); err != nil { // 89 misses, after which the Loader expects misses
		t.Fatal(err)
	}
	load(keys[11:], nil)
}

func TestAGetAfterALoadIsAHit(t *testing.T) {
	r, _, _ := refillRig(t, peers.Settings{})
	loads, commands, err := r.secondGets(t.Context(), names(2*againKeys))
	if err != nil || loads != 0 || commands > 1 { // one command is allowed: TIME
		t.Errorf("the second Gets of %d keys made %d loads and %d commands, %v; want none", againKeys, loads, commands, err)
	}
}

// wantWork compares the loads and commands since the last reset with the wanted numbers. It allows one additional TIME,
// because the process reads the clock of Redis every 30 s. It also allows one additional PUBLISH, by which the process
// checks its own subscription every 5 s.
func wantWork(t *testing.T, r *rig, loads int64, commands map[string]int64) {
	t.Helper()
	got := r.commands()
	if got["time"] == commands["time"]+1 {
		got["time"]--
	}
	if got["publish"] == commands["publish"]+1 {
		got["publish"]--
	}
	maps.DeleteFunc(got, func(_ string, n int64) bool { return n == 0 })
	if n := r.loads.Load() - r.done; n != loads || !maps.Equal(got, commands) {
		t.Errorf("%d loads, commands %v; want %d loads, commands %v", n, got, loads, commands)
	}
}

func TestTable(t *testing.T) {
	table := &Table{Name: "name", Title: "Title.", Columns: []Column{
		{Name: "time", Unit: "ns", Digits: 1, Per: []string{"bare", "ours"}}, {Name: "n"},
	}}
	for i, bare := range []float64{1, 10, 100} { // each round is slower, which must not change the ratios
		table.Add("bare", "time", bare)
		table.Add("ours", "time", bare*float64(i+1))
	}
	table.Add("ours", "n", 4)
	table.Add("ours", "n", 7)
	if m := table.Median("ours", "n"); m != 5.5 {
		t.Errorf("the median of 4 and 7 is %v", m)
	}
	if m := table.Median("absent", "n"); !math.IsNaN(m) {
		t.Errorf("the median of nothing is %v", m)
	}
	var text strings.Builder
	table.Write(&text)
	const want = `
### name

Title.

| subject | time ns | ÷ bare | ÷ ours | n |
|---|--:|--:|--:|--:|
| bare | 10.0 | 1.00 | 0.50 | – |
| ours | 20.0 | 2.00 | 1.00 | 6 |
`
	if text.String() != want {
		t.Errorf("got %s\nwant %s", text.String(), want)
	}
}
