package goredis

import (
	"context"
	"net"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// The Store checks which of these interfaces a client implements. So it recognises the kind of a client, even if the
// client is a user's own type that embeds a client of go-redis.
type (
	singleClient  interface{ Options() *redis.Options } // a server, or a master behind Sentinel
	clusterClient interface {
		Options() *redis.ClusterOptions
		MasterForKey(ctx context.Context, key string) (*redis.Client, error)
	}
	ringClient interface {
		Options() *redis.RingOptions
		GetShardClients() []*redis.Client // the shards that are up
		GetShardClientForKey(key string) (*redis.Client, error)
	}
)

// reloader is a Cluster client. go-redis reads the slots again when a server redirects a call. A master that is down
// redirects no call, so go-redis learns up to ten seconds late that this master was replaced. To learn of the
// replacement sooner, the Store calls ReloadState after each call that failed.
type reloader interface{ ReloadState(ctx context.Context) }

// obeysDeadlines reports whether the client stops waiting for a socket when the deadline of the ctx passes.
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

// ownClient is the small client of a subscription. The small client has two advantages over the user's client. A
// renewal does not queue behind hundreds of GETs. All connections of the small client end with the subscription.
//
// The small client is made from the options of the user's client. The options of a Sentinel client include a dialer
// that knows the master. On a Ring there is one small client per shard, and the user's Ring says which shards are up
// and which shard has a key. If the user's client shows no options, there is no small client, and the user's client
// is used instead.
//
// Behind Sentinel, the small client carries only the subscription, and renewals stay on the user's client. Sentinel
// does not notify the small client of a failover, so the connections of the small client stay at the replaced master.
// Renewals there would succeed until Sentinel demotes that master, some ten seconds later.
type ownClient struct {
	subscription context.Context // ends with the subscription
	userClient   redis.UniversalClient
	client       closableClient // nil for a Ring and for a client that shows no options
	sentinel     bool           // the user's client finds its master through Sentinel

	mu     sync.Mutex                      // guards shards
	shards map[*redis.Client]*redis.Client // of a Ring: our small client for each shard client of the user
}

type closableClient interface {
	client
	Close() error
}

func newOwnClient(subscription context.Context, user redis.UniversalClient) *ownClient {
	o := &ownClient{subscription: subscription, userClient: user}
	switch user := user.(type) {
	case singleClient:
		o.client = cloneSingle(subscription, user.Options())
		o.sentinel = user.Options().Addr == "FailoverClient" // the address that go-redis gives to each Sentinel client
	case clusterClient:
		o.client = cloneCluster(subscription, user.Options())
		o.sentinel = user.Options().ClusterSlots != nil // NewFailoverClusterClient, or the user's own function
	case ringClient:
		o.shards = make(map[*redis.Client]*redis.Client)
	}
	return o
}

// cloneSingle makes a small client from the options of a big one. go-redis has filled the defaults into these
// options, so a MaxRetries of 0 in them means no retry. In the options of a new client, 0 means the default, and -1
// means no retry.
func cloneSingle(subscription context.Context, o *redis.Options) *redis.Client {
	small := *o
	small.PoolSize, small.MinIdleConns, small.MaxIdleConns, small.MaxActiveConns = 2, 0, 0, 0
	small.ContextTimeoutEnabled = true
	dialOnce(&small)
	if small.MaxRetries == 0 {
		small.MaxRetries = -1
	}
	small.PushNotificationProcessor = nil
	small.MaintNotificationsConfig = noMaintenance()
	small.Dialer = boundDialer(subscription, small.Dialer)
	return redis.NewClient(&small)
}

func cloneCluster(subscription context.Context, o *redis.ClusterOptions) *redis.ClusterClient {
	small := *o
	small.PoolSize, small.MinIdleConns, small.MaxIdleConns, small.MaxActiveConns = 2, 0, 0, 0
	small.ContextTimeoutEnabled = true
	small.MaintNotificationsConfig = noMaintenance()
	if small.Dialer == nil {
		timeout := small.DialTimeout
		if timeout == 0 {
			timeout = 5 * time.Second // the default of go-redis
		}
		small.Dialer = redis.NewDialer(&redis.Options{DialTimeout: timeout, TLSConfig: small.TLSConfig})
	}
	small.Dialer = boundDialer(subscription, small.Dialer)
	newNode := small.NewClient // not nil: NewClusterClient has filled it in
	small.NewClient = func(o *redis.Options) *redis.Client {
		dialOnce(o)
		return newNode(o)
	}
	return redis.NewClusterClient(&small)
}

// noMaintenance turns off maintenance notifications, which a small client does not need. It also turns off the lookup
// of the server's name for these notifications, because go-redis ignores the ctx during that lookup.
func noMaintenance() *maintnotifications.Config {
	return &maintnotifications.Config{
		Mode:         maintnotifications.ModeDisabled,
		EndpointType: maintnotifications.EndpointTypeNone,
	}
}

// dialOnce makes a pool dial once. By default, a pool of go-redis dials five times in a row, with pauses that outlast
// the subscription.
func dialOnce(o *redis.Options) {
	o.DialerRetries, o.DialerRetryTimeout = 1, time.Nanosecond
}

// forKey returns the own client that renews the lease of a key, or nil if the user's client renews it. o may be nil.
func (o *ownClient) forKey(key string) client {
	switch {
	case o == nil || o.sentinel:
		return nil
	case o.client != nil:
		return o.client
	}
	if ring, ok := o.userClient.(ringClient); ok {
		if shard, err := ring.GetShardClientForKey(key); err == nil {
			o.mu.Lock()
			defer o.mu.Unlock()
			if own := o.shards[shard]; own != nil {
				return own
			}
		}
	}
	return nil
}

// servers returns a client for each server to subscribe at. On a Ring, that is every shard that is up, because each
// shard announces only the changes of its own keys. For other clients, servers returns one client, because the nodes
// of a Cluster pass announcements on to each other.
func (o *ownClient) servers() []client {
	ring, ok := o.userClient.(ringClient)
	switch {
	case o.client != nil:
		return []client{o.client}
	case !ok:
		return []client{o.userClient}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	old, all := o.shards, []client{}
	o.shards = make(map[*redis.Client]*redis.Client)
	for _, shard := range ring.GetShardClients() {
		own := old[shard]
		if own == nil {
			own = cloneSingle(o.subscription, shard.Options())
		}
		delete(old, shard)
		o.shards[shard] = own
		all = append(all, own)
	}
	for _, gone := range old {
		gone.Close()
	}
	return all
}

// changed reports whether the shards of a Ring that are up differ from the shards that servers last returned.
func (o *ownClient) changed() bool {
	ring, ok := o.userClient.(ringClient)
	if !ok {
		return false
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	up := ring.GetShardClients()
	for _, shard := range up {
		if o.shards[shard] == nil {
			return true
		}
	}
	return len(up) != len(o.shards)
}

// close closes the clients of the subscription. The end of the subscription's ctx has closed their connections (see
// boundDialer), so close does not wait for a silent server.
func (o *ownClient) close() {
	if o.client != nil {
		o.client.Close()
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, own := range o.shards {
		own.Close()
	}
}

type dialer = func(ctx context.Context, network, addr string) (net.Conn, error)

// boundDialer returns a dialer whose connections are closed when the subscription ends. A dial returns when the
// subscription ends or when the ctx of the dial ends. go-redis alone would go on after either end: its TLS dialer
// ignores the ctx, nothing interrupts a read, and a PubSub reconnects.
func boundDialer(subscription context.Context, dial dialer) dialer {
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
			return &boundConn{d.Conn, context.AfterFunc(subscription, func() { d.Close() })}, nil
		case <-subscription.Done():
			return closedConn(), nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// closedConn returns a closed connection, for a dial after the subscription has ended. If the dial returned an error,
// the pool of go-redis would wait, log the error and dial again.
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
