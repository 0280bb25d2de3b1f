package sqlxrefill

import (
	"context"
	"fmt"
	"time"

	"github.com/refill-go/refill"
)

// Statement is a query that has a name, and settings of its own. The text of a call finds its Statement: GetContext and
// SelectContext are called as before.
//
//	const userByID = `SELECT * FROM users WHERE id = $1`
//	sqlxrefill.Config{Name: "shop", Statements: []sqlxrefill.Statement{{
//		Name: "user.by.id", Query: userByID, TTL: time.Hour,
//		Tags: func(args []any) []string { return []string{"users", fmt.Sprint("users/", args[0])} },
//	}}}
type Statement struct {
	// Name stands in the keys of the results, and so in events, errors and Redis, in place of the first bytes of the
	// text. Required. Letters, digits, '.', '_' and '-', at most 64 bytes.
	Name string

	// Query is the text as it is passed to GetContext and SelectContext, byte for byte. Required.
	Query string

	// TTL, StaleFor and NotFoundTTL replace the settings of Config for the results of this query. Default 0: those of
	// Config. Negative StaleFor or NotFoundTTL: off.
	TTL, StaleFor, NotFoundTTL time.Duration

	// MaxRows and MaxBytes limit a result. When a result has more rows, or more encoded bytes, reading stops, and the
	// call fails with an error that wraps refill.ErrInvalid. Default 0: no limit. Config.MaxBytes holds as well.
	MaxRows, MaxBytes int

	// Tags returns the tags of a result, by the arguments of its query, see DB.InvalidateTag. Results, lists and absent
	// rows get these tags, besides Config.Tags. A value has at most 64 tags. Tags is called once per query that runs. It
	// gets copies of the arguments, and must depend on nothing else. Default: no further tags.
	Tags func(args []any) []string

	// Uncached makes each call query the database as sqlx does, without the cache.
	Uncached bool
}

// statements are the Statements of a DB, by text. Nothing changes the map after New.
type statements map[string]*Statement

func newStatements(list []Statement, check func(text string) error) (statements, error) {
	byText, names := statements{}, map[string]bool{}
	for i := range list {
		s := list[i]
		field := fmt.Sprintf("Statements[%d]", i)
		if err := checkStatement(&s, check); err != nil {
			return nil, fmt.Errorf("%w: %s: %w", refill.ErrInvalid, field, err)
		}
		switch {
		case names[s.Name]:
			return nil, invalid(field, "two statements have the name %q", s.Name)
		case byText[s.Query] != nil:
			return nil, invalid(field, "%q and %q have the same text", byText[s.Query].Name, s.Name)
		}
		names[s.Name], byText[s.Query] = true, &s
	}
	return byText, nil
}

func checkStatement(s *Statement, check func(text string) error) error {
	if s.Name == "" || len(s.Name) > 64 || string(appendLegible([]byte{':'}, s.Name, 64)[1:]) != s.Name {
		return invalid("Name", "%q: 1 to 64 letters, digits, '.', '_' and '-'", s.Name)
	}
	if !s.Uncached { // the text of an uncached statement may write
		if err := check(s.Query); err != nil {
			return err
		}
	}
	switch {
	case s.TTL < 0:
		return invalid("TTL", "%v is negative", s.TTL)
	case s.MaxRows < 0:
		return invalid("MaxRows", "%d is negative", s.MaxRows)
	case s.MaxBytes < 0:
		return invalid("MaxBytes", "%d is negative", s.MaxBytes)
	}
	return nil
}

// uncached reports whether calls with this text go to the database.
func (all statements) uncached(text string) bool { return all.of(text).Uncached }

// none stands for a text without a Statement.
var none Statement

func (all statements) of(text string) *Statement {
	if s := all[text]; s != nil {
		return s
	}
	return &none
}

// apply sets what a Statement says on a load. absent: the query has returned no row.
func (s *Statement) apply(ctx context.Context, args []any, absent bool) {
	f := refill.FillFrom(ctx)
	switch {
	case absent && s.NotFoundTTL != 0:
		f.SetTTL(s.NotFoundTTL)
	case !absent && s.TTL != 0:
		f.SetTTL(s.TTL)
	}
	if s.StaleFor != 0 {
		f.SetStaleFor(s.StaleFor)
	}
	if s.Tags != nil {
		f.Tag(s.Tags(args)...)
	}
}

// exceeded returns an error if a result has more rows or bytes than its Statement allows.
func (s *Statement) exceeded(r *result) error {
	switch {
	case s.MaxRows > 0 && r.rows > s.MaxRows:
		return invalid("query", "%s: more than %d rows (MaxRows)", s.Name, s.MaxRows)
	case s.MaxBytes > 0 && len(r.encoded) > s.MaxBytes:
		return invalid("query", "%s: more than %d bytes (MaxBytes)", s.Name, s.MaxBytes)
	}
	return nil
}
