package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
)

// Report is everything that one run of bench measured.
type Report struct {
	Machine map[string]string `json:"machine"` // what the figures depend on: versions, cores, load average
	Args    []string          `json:"args"`
	Tables  []*Table          `json:"tables"`
}

// Table holds the figures of a suite, or of one case of a suite. A table has a row per subject, and a cell has one
// sample per round. Write prints the medians.
type Table struct {
	Name    string   `json:"name"`  // "stampede-hot"
	Title   string   `json:"title"` // explains the figures, in a sentence or more
	Columns []Column `json:"columns"`
	Rows    []*Row   `json:"rows"`

	Series []*Series `json:"series,omitempty"` // curves for pictures, measured in the first round
}

// Column is one kind of figure, such as "p99". For each subject in Per, Write adds a column with the ratios to the
// figure of that subject.
type Column struct {
	Name   string   `json:"name"`
	Unit   string   `json:"unit,omitempty"`
	Digits int      `json:"-"` // digits after the decimal point
	Per    []string `json:"ratios,omitempty"`
}

// Row holds the samples of a subject, by column.
type Row struct {
	Subject string               `json:"subject"`
	Samples map[string][]float64 `json:"samples"`
}

// Add adds a sample. If value is NaN, Add adds no sample, but still adds the row.
func (t *Table) Add(subject, column string, value float64) {
	r := t.row(subject)
	if r == nil {
		r = &Row{Subject: subject, Samples: map[string][]float64{}}
		t.Rows = append(t.Rows, r)
	}
	if !math.IsNaN(value) {
		r.Samples[column] = append(r.Samples[column], value)
	}
}

func (t *Table) row(subject string) *Row {
	for _, r := range t.Rows {
		if r.Subject == subject {
			return r
		}
	}
	return nil
}

// Median returns the median of a cell. It returns NaN if there is no sample.
func (t *Table) Median(subject, column string) float64 {
	r := t.row(subject)
	if r == nil || len(r.Samples[column]) == 0 {
		return math.NaN()
	}
	s := slices.Sorted(slices.Values(r.Samples[column]))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// ratio divides the figure of subject by the figure of per, for each round or turn, and returns the median of these
// ratios. A slow phase of the machine affects both figures of a ratio alike.
func (t *Table) ratio(subject, column, per string) float64 {
	of, to := t.row(subject), t.row(per)
	if of == nil || to == nil {
		return math.NaN()
	}
	a, b := of.Samples[column], to.Samples[column]
	var ratios Table
	for i := range min(len(a), len(b)) {
		ratios.Add(subject, column, a[i]/b[i])
	}
	return ratios.Median(subject, column)
}

// Write prints the table as Markdown.
func (t *Table) Write(w io.Writer) {
	fmt.Fprintf(w, "\n### %s\n\n%s\n\n", t.Name, t.Title)
	head, rule := []string{"subject"}, []string{"---"}
	for _, c := range t.Columns {
		head, rule = append(head, strings.TrimSpace(c.Name+" "+c.Unit)), append(rule, "--:")
		for _, per := range c.Per {
			head, rule = append(head, "÷ "+per), append(rule, "--:")
		}
	}
	fmt.Fprintf(w, "| %s |\n|%s|\n", strings.Join(head, " | "), strings.Join(rule, "|"))
	for _, r := range t.Rows {
		cells := []string{r.Subject}
		for _, c := range t.Columns {
			cells = append(cells, number(t.Median(r.Subject, c.Name), c.Digits))
			for _, per := range c.Per {
				cells = append(cells, number(t.ratio(r.Subject, c.Name, per), 2))
			}
		}
		fmt.Fprintf(w, "| %s |\n", strings.Join(cells, " | "))
	}
}

func number(f float64, digits int) string {
	if math.IsNaN(f) {
		return "–"
	}
	return fmt.Sprintf("%.*f", digits, f)
}
