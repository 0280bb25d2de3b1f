package peers

import (
	"context"
	"encoding/json"
	"sync"

	"github.com/redis/go-redis/v9"
)

// pushed shows the least possible cost of waiting for another process. The process that gets the lock loads. Then it
// writes and announces the value in one pipeline. The other processes get the value from the announcement. No process
// renews, checks or retries anything.
var pushed = Peer{
	Name: "setpublish", Module: "github.com/redis/go-redis/v9",
	About:  "GET, SET NX, load, then SET and PUBLISH of the value in one pipeline; JSON",
	Shared: true, Locks: true, Limit: true,
	Open: openPushed,
}

type pushedCache struct {
	remote
	messages *redis.PubSub
	mu       sync.Mutex
	waiting  map[string]chan *Product // by key
}

const pushedChannel = "pushed"

func openPushed(s Settings) (Cache, error) {
	ctx := context.Background()
	c := &pushedCache{remote: dial(s), waiting: make(map[string]chan *Product)}
	c.messages = c.Subscribe(ctx, pushedChannel)
	if _, err := c.messages.Receive(ctx); err != nil {
		return nil, err
	}
	go c.receive()
	return c, nil
}

func (c *pushedCache) receive() {
	for {
		m, err := c.messages.ReceiveMessage(context.Background())
		if err != nil {
			return
		}
		p := new(Product)
		if json.Unmarshal([]byte(m.Payload), p) == nil {
			select {
			case c.box(p.ID) <- p:
			default: // the channel is full: no Get has taken the previous value of this key
			}
		}
	}
}

// box returns the channel on which the announced value of a key arrives.
func (c *pushedCache) box(key string) chan *Product {
	c.mu.Lock()
	defer c.mu.Unlock()
	box := c.waiting[key]
	if box == nil {
		box = make(chan *Product, 1)
		c.waiting[key] = box
	}
	return box
}

func (c *pushedCache) Get(ctx context.Context, key string) (*Product, error) {
	if p, err := c.read(ctx, key); p != nil || err != nil {
		return p, err
	}
	won, err := c.SetNX(ctx, key+":lock", 1, c.TTL).Result()
	if err != nil {
		return nil, err
	}
	if !won {
		select {
		case p := <-c.box(key):
			return p, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	p, err := c.Load(ctx, key)
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(p)
	if err != nil {
		return nil, err
	}
	pipeline := c.Pipeline()
	pipeline.Set(ctx, key, text, c.TTL)
	pipeline.Publish(ctx, pushedChannel, text)
	pipeline.Del(ctx, key+":lock")
	_, err = pipeline.Exec(ctx)
	return p, err
}

func (c *pushedCache) Close() error {
	_ = c.messages.Close()
	return c.remote.Close()
}
