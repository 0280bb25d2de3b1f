package main

import (
	"cmp"
	"fmt"
	"html"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// This file draws pictures of a report, as SVG. The background of a picture is white, so that the picture is readable
// on a dark page. If the report is the same, the bytes of the pictures are the same.

// drawAll writes to dir the pictures for which the report has figures. If dir is empty, drawAll does nothing.
func drawAll(dir string, r *Report) error {
	if dir == "" {
		return nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, charts := range map[string][]chart{
		"queries.svg": queryCharts(r), "latency.svg": latencyChart(r), "commands.svg": commandChart(r),
	} {
		if len(charts) == 0 {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(draw(charts)), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func (r *Report) table(name string) *Table {
	for _, t := range r.Tables {
		if t.Name == name {
			return t
		}
	}
	return &Table{}
}

// queryCharts show the database queries per second during the expiries of a hot key, with one chart per subject.
func queryCharts(r *Report) (charts []chart) {
	most, long := 10.0, 0.0
	for _, show := range []struct{ subject, title string }{
		{"goredis", "GET, load, SET"}, {"sf", "the same in a singleflight"}, {"refill", "refill"},
	} {
		s := r.table("stampede-hot").curve(show.subject, queries)
		if s == nil || len(s.Y) == 0 {
			continue
		}
		most, long = max(most, slices.Max(s.Y)), s.X[len(s.X)-1]+tenth.Seconds()
		charts = append(charts, chart{
			title: show.title, height: 120, y: "queries/s", bars: true,
			curves: []curve{{show.title, colours[len(charts)%len(colours)], s.X, s.Y}},
		})
	}
	for i := range charts {
		charts[i].ys, charts[i].xs = decades(1, most), steps(0, long, 1)
	}
	if len(charts) > 0 {
		charts[len(charts)-1].x = "seconds; a hot key with a TTL of 1 s, in a fleet"
	}
	return charts
}

// latencyChart shows how long Gets of a hot key take, by percentile, with one curve per subject.
func latencyChart(r *Report) []chart {
	c := chart{title: "Gets of a hot key that expires each second", height: 340, x: "percentile", y: "ms", legend: true}
	most := 1.0
	for _, show := range []struct{ table, subject, label string }{
		{"stampede-hot", "sf", "sf"}, {"stampede-hot", "rocks-weak", "rocks-weak"}, {"stampede-hot", "aside", "aside"},
		{"stampede-hot", "refill", "refill"}, {"stampede-hot-stale", "sturdyc-redis", "sturdyc-redis, stale"},
		{"stampede-hot-stale", "refill", "refill, StaleFor"},
	} {
		s := r.table(show.table).curve(show.subject, latencies)
		if s == nil || len(s.Y) == 0 {
			continue
		}
		line := curve{label: show.label, colour: colours[len(c.curves)%len(colours)], y: s.Y}
		for _, p := range s.X {
			line.x = append(line.x, nines(p))
		}
		most = max(most, slices.Max(s.Y))
		c.curves = append(c.curves, line)
	}
	if len(c.curves) == 0 {
		return nil
	}
	c.ys, c.xs = decades(0.0001, most), axis{lo: 0, hi: 4}
	for _, p := range []float64{0, 50, 90, 99, 99.9, 99.99} {
		c.xs.ticks = append(c.xs.ticks, tick{nines(p), strconv.FormatFloat(p, 'f', -1, 64) + " %"})
	}
	return []chart{c}
}

// nines returns 1 for 90 %, 2 for 99 %, and so on.
func nines(percent float64) float64 { return -math.Log10(1 - percent/100) }

// commandChart shows how many commands, trips and loads an expiry costs, by the number of nodes.
func commandChart(r *Report) []chart {
	t := r.table("scale-nodes")
	c := chart{title: "refill: one expiry of a hot key, by nodes", height: 300, x: "nodes", y: "per expiry", legend: true}
	most, nodes := 10.0, 2.0
	for _, column := range []string{"commands/expiry", "trips/expiry", "loads/expiry"} {
		line := curve{label: strings.TrimSuffix(column, "/expiry"), colour: colours[len(c.curves)]}
		for _, row := range t.Rows {
			n, err := strconv.ParseFloat(row.Subject, 64)
			if y := t.Median(row.Subject, column); err == nil && y > 0 {
				line.x, line.y = append(line.x, math.Log2(n)), append(line.y, y)
				most, nodes = max(most, y), max(nodes, n)
			}
		}
		if len(line.x) > 0 {
			c.curves = append(c.curves, line)
		}
	}
	if len(c.curves) == 0 {
		return nil
	}
	c.ys, c.xs = decades(1, most), axis{lo: 0, hi: math.Log2(nodes)}
	for n := 1.0; n <= nodes; n *= 2 {
		c.xs.ticks = append(c.xs.ticks, tick{math.Log2(n), strconv.FormatFloat(n, 'f', -1, 64)})
	}
	return []chart{c}
}

// colours can be told apart with all kinds of colour vision (Okabe and Ito).
var colours = []string{"#d55e00", "#e69f00", "#0072b2", "#009e73", "#cc79a7", "#000000"}

// chart is one chart of a picture. The charts of a picture stand below each other.
type chart struct {
	title, x, y  string
	height       float64
	xs, ys       axis
	curves       []curve
	bars, legend bool
}

type curve struct {
	label, colour string
	x, y          []float64
}

// axis is a scale from lo to hi. If log is set, lo and hi are decimal logarithms.
type axis struct {
	lo, hi float64
	log    bool
	ticks  []tick
}

type tick struct {
	at    float64
	label string
}

// decades returns a logarithmic axis from lo to at least largest, with a tick at each power of ten.
func decades(lo, largest float64) axis {
	a := axis{lo: math.Log10(lo), hi: math.Ceil(math.Log10(largest) + 1e-9), log: true}
	for d := a.lo; d <= a.hi+1e-9; d++ {
		v := math.Pow(10, math.Round(d))
		a.ticks = append(a.ticks, tick{d, strconv.FormatFloat(v, 'f', max(0, -int(math.Round(d))), 64)})
	}
	return a
}

// steps returns an axis with a tick at each step.
func steps(lo, hi, step float64) axis {
	a := axis{lo: lo, hi: hi}
	for v := lo; v <= hi+1e-9; v += step {
		a.ticks = append(a.ticks, tick{v, strconv.FormatFloat(v, 'f', -1, 64)})
	}
	return a
}

// at returns the position of a value on the axis, from 0 (lo) to 1 (hi).
func (a axis) at(v float64) float64 {
	if a.log {
		v = math.Log10(max(v, 1e-12))
	}
	return min(1, max(0, (v-a.lo)/(a.hi-a.lo)))
}

// of returns the position of a tick on the axis, from 0 (lo) to 1 (hi).
func (a axis) of(t tick) float64 { return (t.at - a.lo) / (a.hi - a.lo) }

const (
	width              = 760.0
	left, right        = 70.0, 20.0
	above, below       = 34.0, 26.0
	plotWidth          = width - left - right
	legendAt, legendDy = left + 14, 17.0
)

// svg is the text of the picture that has been drawn so far.
type svg struct{ strings.Builder }

func (s *svg) line(x1, y1, x2, y2 float64, style string) {
	fmt.Fprintf(s, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" %s/>\n", x1, y1, x2, y2, style)
}

func (s *svg) text(x, y float64, style, text string) {
	fmt.Fprintf(s, "<text x=\"%.1f\" y=\"%.1f\" %s>%s</text>\n", x, y, style, html.EscapeString(text))
}

func draw(charts []chart) string {
	total := 22.0
	for _, c := range charts {
		total += above + c.height + below
	}
	s := new(svg)
	fmt.Fprintf(s, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" height=\"%.0f\" "+
		"font-family=\"sans-serif\" font-size=\"12\" fill=\"#222\">\n"+
		"<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n", width, total, width, total)
	top := 0.0
	for _, c := range charts {
		s.chart(c, top+above)
		top += above + c.height + below
	}
	s.WriteString("</svg>\n")
	return s.String()
}

// chart draws a chart whose plot begins at top.
func (s *svg) chart(c chart, top float64) {
	bottom := top + c.height
	s.text(left, top-12, `font-size="14" font-weight="bold"`, c.title)
	for _, t := range c.ys.ticks {
		y := bottom - c.ys.of(t)*c.height
		s.line(left, y, width-right, y, `stroke="#ddd"`)
		s.text(left-8, y+4, `text-anchor="end"`, t.label)
	}
	for _, t := range c.xs.ticks {
		x := left + c.xs.of(t)*plotWidth
		s.line(x, bottom, x, bottom+5, `stroke="#222"`)
		s.text(x, bottom+18, `text-anchor="middle"`, t.label)
	}
	s.line(left, bottom, width-right, bottom, `stroke="#222"`)
	s.text(left+plotWidth/2, bottom+36, `text-anchor="middle"`, c.x)
	fmt.Fprintf(s, "<text transform=\"translate(16 %.1f) rotate(-90)\" text-anchor=\"middle\">%s</text>\n",
		top+c.height/2, html.EscapeString(c.y))
	for i, line := range c.curves {
		s.curve(c, line, bottom)
		if c.legend {
			y := top + 8 + float64(i)*legendDy
			s.line(legendAt, y, legendAt+22, y, fmt.Sprintf("stroke=%q stroke-width=\"3\"", line.colour))
			s.text(legendAt+30, y+4, "", line.label)
		}
	}
}

// curve draws a line through the points of a curve. If c.bars is set, curve instead draws a bar for each value above 0.
func (s *svg) curve(c chart, line curve, bottom float64) {
	var points []string
	for i, x := range line.x {
		px, height := left+c.xs.at(x)*plotWidth, c.ys.at(line.y[i])*c.height
		points = append(points, fmt.Sprintf("%.1f,%.1f", px, bottom-height))
		if c.bars && line.y[i] > 0 {
			wide := plotWidth / float64(len(line.x))
			fmt.Fprintf(s, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=%q/>\n",
				px, bottom-height, cmp.Or(wide, 1), height, line.colour)
		}
	}
	if !c.bars {
		fmt.Fprintf(s, "<polyline points=\"%s\" fill=\"none\" stroke=%q stroke-width=\"2\"/>\n",
			strings.Join(points, " "), line.colour)
	}
}
