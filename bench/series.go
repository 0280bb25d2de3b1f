package main

import "time"

// Series is a curve of a subject: its loads over time, or the latencies of its Gets.
type Series struct {
	Subject string    `json:"subject"`
	Name    string    `json:"name"`
	X       []float64 `json:"x"`
	Y       []float64 `json:"y"`
}

const (
	queries   = "queries" // x: seconds since the run began; y: loads per second, from x to x + 0.1 s
	latencies = "latency" // x: a percentage p; y: p percent of the Gets took at most this many ms
)

const tenth = 100 * time.Millisecond

// loadsOverTime returns the curve named queries.
func (o *outcome) loadsOverTime(subject string, length time.Duration) *Series {
	s := &Series{Subject: subject, Name: queries}
	for at := time.Duration(0); at < length; at += tenth {
		s.X = append(s.X, at.Seconds())
	}
	s.Y = make([]float64, len(s.X))
	for _, l := range o.Loads {
		if i := int((l.Began - o.start) / tenth.Microseconds()); i >= 0 && i < len(s.Y) {
			s.Y[i] += float64(time.Second / tenth)
		}
	}
	return s
}

// percentiles returns the curve named latencies.
func (o *outcome) percentiles(subject string) *Series {
	s := &Series{Subject: subject, Name: latencies}
	if o.warm.TotalCount() == 0 {
		return s
	}
	for _, p := range []float64{
		1, 10, 20, 30, 40, 50, 60, 70, 75, 80, 85, 88, 90, 91, 92, 93, 94, 95, 96, 97, 98,
		99, 99.25, 99.5, 99.75, 99.9, 99.95, 99.975, 99.99,
	} {
		s.X, s.Y = append(s.X, p), append(s.Y, ms(o.warm, p))
	}
	return s
}

// curve returns the curve of a subject with this name, or nil.
func (t *Table) curve(subject, name string) *Series {
	for _, s := range t.Series {
		if s.Subject == subject && s.Name == name {
			return s
		}
	}
	return nil
}
