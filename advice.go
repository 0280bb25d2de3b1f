package refill

import (
	"fmt"
	"reflect"
	"sync"
	"time"
)

// advice is what New accepts and still finds doubtful: settings that have no effect, or not the one that is meant.
func (c *Config) advice() (doubts []error) {
	doubt := func(is bool, field, format string, args ...any) {
		if is {
			doubts = append(doubts, fmt.Errorf("refill: %s: %s", field, fmt.Sprintf(format, args...)))
		}
	}
	life := c.TTL + max(c.StaleFor, c.StaleIfError)
	doubt(c.SoftTimeout > 0 && c.StaleFor == 0, "SoftTimeout",
		"%v, but StaleFor is 0: there is nothing to serve after it", c.SoftTimeout)
	doubt(c.SoftTimeout >= c.LoadTimeout, "SoftTimeout", "%v, LoadTimeout (%v) is always first", c.SoftTimeout, c.LoadTimeout)
	doubt(c.LocalTTL > c.TTL, "LocalTTL", "%v, above TTL (%v) it has no effect", c.LocalTTL, c.TTL)
	doubt(c.LoadTimeout > max(life, 10*time.Second), "LoadTimeout", // the default is nobody's mistake
		"%v: a load may take longer than its value lives (%v)", c.LoadTimeout, life)
	doubt(c.NotFoundTTL > c.TTL, "NotFoundTTL", "%v: an absence lives longer than a value (%v)", c.NotFoundTTL, c.TTL)
	doubt(c.StaleIfError > 0 && c.StaleIfError < c.StaleFor, "StaleIfError",
		"%v, below StaleFor (%v) it has no effect", c.StaleIfError, c.StaleFor)
	doubt(c.ErrorTTL > time.Minute && c.ErrorTTL > c.TTL, "ErrorTTL",
		"%v: one failed load keeps a key away for longer than a value lives", c.ErrorTTL)
	doubt(c.LocalTTL == 0 && c.LocalBytes > 0, "LocalBytes", "%d, but LocalTTL is off: there is no L1", c.LocalBytes)
	doubt(c.EarlyRefresh > 0 && c.EarlyRefresh < 0.5, "EarlyRefresh", "%v: refreshed more than twice per TTL", c.EarlyRefresh)
	return doubts
}

// names are those of the Loaders of this process, with what they keep under them: two types under one name would take each
// other's values for misses for ever, and load all the time.
var names = registry{kinds: make(map[namedIn]*use)}

type registry struct {
	mu    sync.Mutex
	kinds map[namedIn]*use
}

type namedIn struct {
	store Store
	name  string
}

type use struct {
	kind    string
	loaders int
}

// enter notes that a Loader keeps values of a kind under a name of a store. leave is called when it closes.
func (r *registry) enter(s Store, name, kind string) (leave func(), err error) {
	if !reflect.ValueOf(s).Comparable() {
		return func() {}, nil
	}
	at := namedIn{s, name}
	r.mu.Lock()
	defer r.mu.Unlock()
	u := r.kinds[at]
	switch {
	case u == nil:
		u = &use{kind: kind}
		r.kinds[at] = u
	case u.kind != kind:
		return nil, invalid("name", "%q is in use for %q in this store, and cannot be for %q, too", name, u.kind, kind)
	}
	u.loaders++
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if u.loaders--; u.loaders == 0 {
			delete(r.kinds, at)
		}
	}, nil
}
