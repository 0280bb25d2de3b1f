package sqlxrefill

import (
	"database/sql"
	"reflect"
	"slices"
	"sync"

	"github.com/refill-go/refill/driver"
)

// names holds the open DBs of this process by store and name. The keys of a DB depend on its name, but not on its
// database. So if two DBs had one name and one store, but different databases, each of the two would answer with the
// rows of the other.
var names = registry{users: make(map[nameIn][]*nameUse)}

type registry struct {
	mu    sync.Mutex
	users map[nameIn][]*nameUse
}

type nameIn struct {
	store driver.Store
	name  string
}

type nameUse struct {
	db   *sql.DB
	same bool // Config.SameData
}

// enter registers a DB over db. The caller calls leave when the DB closes. A DB without a shared store has a store of
// its own, and a store that cannot be compared cannot be registered: in both cases enter accepts every name.
func (r *registry) enter(db *sql.DB, cfg Config) (leave func(), err error) {
	if cfg.Shared == nil || !reflect.ValueOf(cfg.Shared).Comparable() {
		return func() {}, nil
	}
	at, use := nameIn{cfg.Shared, cfg.Name}, &nameUse{db, cfg.SameData}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, other := range r.users[at] {
		if other.db != db && !other.same && !use.same {
			return nil, invalid("Name", "%q is in use for another database in this store; choose another Name, or set "+
				"SameData if the data are the same", cfg.Name)
		}
	}
	r.users[at] = append(r.users[at], use)
	return func() { r.leave(at, use) }, nil
}

func (r *registry) leave(at nameIn, use *nameUse) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.users[at] = slices.DeleteFunc(r.users[at], func(u *nameUse) bool { return u == use })
	if len(r.users[at]) == 0 {
		delete(r.users, at)
	}
}
