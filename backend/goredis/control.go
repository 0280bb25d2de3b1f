package goredis

import (
	"context"
	"net"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// The kinds of client, which can be told also where one is embedded in a type of the user's.
type (
	singleClient  interface{ Options() *redis.Options } // a server, or a master behind Sentinel
	clusterClient interface{ Options() *redis.ClusterOptions }
	ringClient    interface {
		Options() *redis.RingOptions
		GetShardClients() []*redis.Client // those that are up
		GetShardClientForKey(key string) (*redis.Client, error)
	}
)

// reloader is a Cluster client. Left alone it learns up to ten seconds late that a master which does not answer was replaced:
// it looks at the slots again when a server sends it elsewhere, and a dead one does not.
type reloader interface{ ReloadState(ctx context.Context) }

// obeysDeadlines reports that the client gives up a socket when the deadline of its ctx is over.
func obeysDeadlines(c redis.UniversalClient) bool {
	switch c := c.(type) {
	case singleClient:
		return c.Options().ContextTimeoutEnabled
	case clusterClient:
		return c.Options().ContextTimeoutEnabled
	case ringClient:
		return c.Options().ContextTimeoutEnabled
	}
	return false
}

// control is the small client that a session has of its own, beside the user's: so that a renewal does not queue behind
// hundreds of GETs, and that all which the session began ends with it. It is made from the options of the user's, a
// Sentinel client's dialer included, which knows the master. For a Ring it is one client per shard, and the user's Ring
// still says which shards are up and whose a key is. A client that shows no options is used itself.
//
// Behind Sentinel it serves the subscription only. Nobody tells it of a failover, so its connections stay at a replaced
// master, which goes on renewing leases until Sentinel gets hold of it, some ten seconds.
type control struct {
	session  context.Context
	user     redis.UniversalClient
	own      ownClient // nil for a Ring and for a client that shows no options
	sentinel bool

	mu     sync.Mutex                      // guards shards
	shards map[*redis.Client]*redis.Client // of a Ring: the user's and ours
}

type ownClient interface {
	client
	Close() error
}

func newControl(session context.Context, user redis.UniversalClient) *control {
	c := &control{session: session, user: user}
	switch user := user.(type) {
	case singleClient:
		c.own = cloneSingle(session, user.Options())
		c.sentinel = user.Options().Addr == "FailoverClient" // so go-redis calls all of them
	case clusterClient:
		c.own = cloneCluster(session, user.Options())
		c.sentinel = user.Options().ClusterSlots != nil // NewFailoverClusterClient, or who knows what
	case ringClient:
		c.shards = make(map[*redis.Client]*redis.Client)
	}
	return c
}

// cloneSingle makes a small client of a big one's options. Those are of a client that has filled in its defaults: there,
// 0 retries are none, while for a new client they stand for the default.
func cloneSingle(session context.Context, o *redis.Options) *redis.Client {
	small := *o
	small.PoolSize, small.MinIdleConns, small.MaxIdleConns, small.MaxActiveConns = 2, 0, 0, 0
	small.ContextTimeoutEnabled = true
	dialOnce(&small)
	if small.MaxRetries == 0 {
		small.MaxRetries = -1
	}
	small.PushNotificationProcessor = nil
	small.MaintNotificationsConfig = noMaintenance()
	small.Dialer = bound(session, small.Dialer)
	return redis.NewClient(&small)
}

func cloneCluster(session context.Context, o *redis.ClusterOptions) *redis.ClusterClient {
	small := *o
	small.PoolSize, small.MinIdleConns, small.MaxIdleConns, small.MaxActiveConns = 2, 0, 0, 0
	small.ContextTimeoutEnabled = true
	small.MaintNotificationsConfig = noMaintenance()
	if small.Dialer == nil {
		timeout := small.DialTimeout
		if timeout == 0 {
			timeout = 5 * time.Second // go-redis' own default
		}
		small.Dialer = redis.NewDialer(&redis.Options{DialTimeout: timeout, TLSConfig: small.TLSConfig})
	}
	small.Dialer = bound(session, small.Dialer)
	newNode := small.NewClient // set: NewClusterClient fills it in
	small.NewClient = func(o *redis.Options) *redis.Client {
		dialOnce(o)
		return newNode(o)
	}
	return redis.NewClusterClient(&small)
}

// noMaintenance turns off the notices of maintenance, which a small client does not need, and with them the look-up of the
// server's name, which no ctx ends.
func noMaintenance() *maintnotifications.Config {
	return &maintnotifications.Config{
		Mode:         maintnotifications.ModeDisabled,
		EndpointType: maintnotifications.EndpointTypeNone,
	}
}

// dialOnce keeps a pool from trying five times in a row, with pauses that last beyond the end of a session.
func dialOnce(o *redis.Options) {
	o.DialerRetries, o.DialerRetryTimeout = 1, time.Nanosecond
}

// forKey is the client for renewing what stands under a key.
func (c *control) forKey(key string) client {
	switch {
	case c.sentinel:
		return c.user
	case c.own != nil:
		return c.own
	}
	if ring, ok := c.user.(ringClient); ok {
		if shard, err := ring.GetShardClientForKey(key); err == nil {
			c.mu.Lock()
			defer c.mu.Unlock()
			if own := c.shards[shard]; own != nil {
				return own
			}
		}
	}
	return c.user
}

// servers are those to subscribe at: on a Ring every shard that is up, since a key's shard announces what happens to it.
// Everywhere else the servers pass announcements on to each other.
func (c *control) servers() []client {
	ring, ok := c.user.(ringClient)
	switch {
	case c.own != nil:
		return []client{c.own}
	case !ok:
		return []client{c.user}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	old, all := c.shards, []client{}
	c.shards = make(map[*redis.Client]*redis.Client)
	for _, shard := range ring.GetShardClients() {
		own := old[shard]
		if own == nil {
			own = cloneSingle(c.session, shard.Options())
		}
		delete(old, shard)
		c.shards[shard] = own
		all = append(all, own)
	}
	for _, gone := range old {
		gone.Close()
	}
	return all
}

// changed reports that other shards of a Ring are up than servers said.
func (c *control) changed() bool {
	ring, ok := c.user.(ringClient)
	if !ok {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	up := ring.GetShardClients()
	for _, shard := range up {
		if c.shards[shard] == nil {
			return true
		}
	}
	return len(up) != len(c.shards)
}

// close ends what is the session's own. The session's ctx is over, so that nothing waits for a silent server.
func (c *control) close() {
	if c.own != nil {
		c.own.Close()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, own := range c.shards {
		own.Close()
	}
}

type dialer = func(ctx context.Context, network, addr string) (net.Conn, error)

// bound makes connections that end with the session, and dials that end with the session or with their ctx: go-redis
// has dialers that look at neither (TLS), reads that nothing interrupts, and a PubSub that reconnects when it should not.
func bound(session context.Context, dial dialer) dialer {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		type dialed struct {
			net.Conn
			err error
		}
		done, gone := make(chan dialed), make(chan struct{})
		defer close(gone)
		go func() {
			conn, err := dial(ctx, network, addr)
			select {
			case done <- dialed{conn, err}:
			case <-gone:
				if err == nil {
					conn.Close()
				}
			}
		}()
		select {
		case d := <-done:
			if d.err != nil {
				return nil, d.err
			}
			return &boundConn{d.Conn, context.AfterFunc(session, func() { d.Close() })}, nil
		case <-session.Done():
			return closedConn(), nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// closedConn is what a dial comes to when the session is over. An error would make the pool wait, log it and try again.
func closedConn() net.Conn {
	conn, other := net.Pipe()
	other.Close()
	conn.Close()
	return conn
}

type boundConn struct {
	net.Conn
	unbind func() bool
}

func (b *boundConn) Close() error {
	b.unbind()
	return b.Conn.Close()
}
