// The quickstart program sends the same traffic to three nodes without refill and to three nodes with refill. The
// scenes are an expiry, a slow database and a failing database. The program prints the results of each scene. To run
// it, you need only Go:
//
//	go run ./examples/quickstart
//
// node.go holds the lines to copy. plain.go holds the code that those lines replace.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
)

func main() {
	redisAddr := flag.String("redis", "", "`address` of a Redis to use, host:port (default: one inside this program)")
	dsn := flag.String("dsn", "", "`DSN` of a database to use, postgres://… or SQLite's (default: SQLite in memory)")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once
	logging.Disable()            // turns off the log of go-redis, because run returns the errors
	var err error
	if flag.NArg() > 0 {
		err = fmt.Errorf("unexpected argument %q; -h shows the flags", flag.Arg(0))
	} else if _, err = run(ctx, os.Stdout, *redisAddr, *dsn, full); ctx.Err() != nil {
		err = errors.New("interrupted")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(1)
	}
}

// size says how large the scenes are. The test runs smaller scenes.
type size struct {
	requests int           // how many requests each fleet gets in a scene
	ttl      time.Duration // TTL of the cache entry; in production rather minutes
	query    time.Duration // how long a query takes
	slow     time.Duration // how long a query takes if the database is slow
	outage   time.Duration // how long the database fails
}

var full = size{
	requests: 300, ttl: 800 * time.Millisecond, query: 50 * time.Millisecond, slow: 250 * time.Millisecond,
	outage: 2 * time.Second,
}

// fleetSize is how many nodes a fleet has. fire acts as the load balancer in front of a fleet.
const fleetSize = 3

// fleet is a group of nodes that do the same work in the same way.
type fleet struct {
	name   string
	urls   []string
	tally  tally
	forget func(context.Context) error // drops what the fleet has cached
}

// demo holds all that runs in this program.
type demo struct {
	size

	out       io.Writer
	database  *rig
	fleets    [2]*fleet // without refill and with it
	client    *http.Client
	closeLast []func() error // functions to call at the end, the last first
}

// run plays all scenes. For each scene, run returns two reports: the first without refill, the second with refill.
func run(ctx context.Context, out io.Writer, redisAddr, dsn string, s size) (reports [][2]report, err error) {
	d := &demo{size: s, out: out, client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: s.requests}}}
	defer func() {
		for _, end := range slices.Backward(d.closeLast) {
			err = errors.Join(err, end())
		}
	}()
	began := time.Now()
	if err := d.start(ctx, redisAddr, dsn); err != nil {
		return nil, err
	}
	for i, s := range d.scenes() {
		r, err := d.play(ctx, i+1, s)
		if err != nil {
			return nil, fmt.Errorf("scene %d: %w", i+1, err)
		}
		reports = append(reports, r)
	}
	fmt.Fprintf(out, "That took %.1f s. The lines to copy are in examples/quickstart/node.go.\n",
		time.Since(began).Seconds())
	return reports, nil
}

// start starts the servers and the nodes.
func (d *demo) start(ctx context.Context, redisAddr, dsn string) error {
	if redisAddr == "" {
		embedded, err := miniredis.Run()
		if err != nil {
			return fmt.Errorf("the embedded Redis does not start: %w", err)
		}
		d.atEnd(func() error { embedded.Close(); return nil })
		embedded.ClockTTL(true) // otherwise the keys of miniredis never expire
		redisAddr = embedded.Addr()
	}
	db, database, err := openDatabase(dsn)
	if err != nil {
		return fmt.Errorf("cannot use the DSN: %w", err)
	}
	d.database = database
	d.atEnd(db.Close)
	if err := createTable(db); err != nil {
		return fmt.Errorf("the database does not work: %w", err)
	}
	d.atEnd(func() error { return dropTable(db) })

	without, with := &fleet{name: "without refill"}, &fleet{name: "with refill"}
	d.fleets = [2]*fleet{without, with}
	for range fleetSize {
		rdb := d.connect(redisAddr)
		if err := rdb.Ping(ctx).Err(); err != nil {
			return fmt.Errorf("redis at %s does not answer: %w", redisAddr, err)
		}
		plain := &plainNode{rdb: rdb, db: db, ttl: d.ttl, tally: &without.tally}
		without.forget = func(ctx context.Context) error { return rdb.Del(ctx, plainKey("42")).Err() }

		n, err := newNode(d.connect(redisAddr), db, d.ttl, with.tally.onEvent)
		if err != nil {
			return err
		}
		d.atEnd(n.products.Close)
		with.forget = func(ctx context.Context) error { return n.products.Invalidate(ctx, "42") }

		if err := errors.Join(d.serve(without, plain), d.serve(with, n)); err != nil {
			return err
		}
	}
	d.atEnd(func() error { return d.gone(context.WithoutCancel(ctx)) }) // empties a Redis given by -redis
	fmt.Fprintf(d.out, "%d nodes without refill, %d with it; Redis at %s, %s. The same traffic for both.\n"+
		"Answers are fresh, stale (the old value), or waited for the database.\n\n",
		fleetSize, fleetSize, redisAddr, db.DriverName())
	return nil
}

// connect returns a new Redis client, so that each node has connections of its own.
func (d *demo) connect(redisAddr string) *redis.Client {
	rdb := redis.NewClient(&redis.Options{Addr: redisAddr, ContextTimeoutEnabled: true})
	d.atEnd(rdb.Close)
	return rdb
}

// serve starts an HTTP server for a node, and adds the URL of the node to its fleet.
func (d *demo) serve(f *fleet, node http.Handler) error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("GET /product/{id}", node)
	server := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(listener) }() // Close ends Serve
	d.atEnd(server.Close)
	d.atEnd(func() error { d.client.CloseIdleConnections(); return nil })
	f.urls = append(f.urls, "http://"+listener.Addr().String()+"/product/42")
	return nil
}

func (d *demo) atEnd(f func() error) { d.closeLast = append(d.closeLast, f) }

// pause sleeps for d. If ctx ends first, pause returns the error of ctx at once.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
