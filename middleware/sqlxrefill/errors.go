package sqlxrefill

import (
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"

	"github.com/refill-go/refill"
)

// QueryError says which kind of error the database has reported. A *refill.LoadError wraps it on all nodes.
//
//	var failed *sqlxrefill.QueryError
//	if errors.As(err, &failed) && failed.SQLState == "57014" { // the query was cancelled by the database
type QueryError struct {
	SQLState string // five characters, such as "42P01"; empty if the driver has not said it
	Number   int    // of MySQL and MariaDB, such as 1146; 0 = unknown
	Err      error  // the driver's error on the node that ran the query; its text on other nodes
}

// Error returns the kind, and then the text of the driver. Other nodes get the first KiB of this text.
func (e *QueryError) Error() string {
	kind := "SQLSTATE " + e.SQLState
	if e.Number != 0 {
		kind += ", MySQL " + strconv.Itoa(e.Number)
	}
	return fmt.Sprintf("%s: %v", kind, e.Err)
}

// Unwrap returns Err.
func (e *QueryError) Unwrap() error { return e.Err }

// withKind wraps the error of a driver in a QueryError, if the driver says what kind of error it is.
func withKind(err error) error {
	state, number := kindOf(err)
	if state == "" {
		return err
	}
	return &QueryError{state, number, err}
}

func stateOf(err error) string {
	state, _ := kindOf(err)
	return state
}

// kindOf returns the SQLSTATE that a driver has reported, and the number of MySQL. PostgreSQL's drivers have a method
// for the SQLSTATE. MySQL's driver has two fields, which kindOf finds by their names: this package imports no driver.
func kindOf(err error) (state string, number int) {
	if err == nil {
		return "", 0
	}
	var said interface{ SQLState() string }
	if errors.As(err, &said) && isState(said.SQLState()) {
		return said.SQLState(), 0
	}
	for ; err != nil; err = errors.Unwrap(err) {
		v := reflect.Indirect(reflect.ValueOf(err))
		if v.Kind() != reflect.Struct {
			continue
		}
		n, s := v.FieldByName("Number"), v.FieldByName("SQLState")
		if n.IsValid() && n.Kind() == reflect.Uint16 && s.IsValid() && s.Type() == reflect.TypeFor[[5]byte]() {
			bytes := s.Interface().([5]byte)
			if state = string(bytes[:]); !isState(state) {
				state = "HY000" // general error: old servers send no SQLSTATE
			}
			return state, int(n.Uint())
		}
	}
	return "", 0
}

// isState reports whether s is a SQLSTATE: five digits or capital letters.
func isState(s string) bool {
	return len(s) == 5 && strings.Trim(s, "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ") == ""
}

// kept gives the error of another node its kind back. Only the text of such an error has travelled.
func kept(err error) error {
	var failed *refill.LoadError
	if !errors.As(err, &failed) {
		return err
	}
	var known *QueryError
	if errors.As(failed.Err, &known) || errors.Is(failed.Err, refill.ErrInvalid) {
		return err
	}
	cause := parseKind(failed.Err)
	if cause == nil {
		return err
	}
	again := *failed
	again.Err = cause
	return &again
}

// parseKind returns the error that a text with a kind stands for, or nil.
func parseKind(text error) error {
	s := text.Error()
	if strings.HasPrefix(s, refill.ErrInvalid.Error()+": ") {
		return &invalidElsewhere{text}
	}
	kind, rest, ok := strings.Cut(s, ": ")
	if !ok || !strings.HasPrefix(kind, "SQLSTATE ") {
		return nil
	}
	state, mysql, isMySQL := strings.Cut(strings.TrimPrefix(kind, "SQLSTATE "), ", MySQL ")
	number, err := 0, error(nil)
	if isMySQL {
		number, err = strconv.Atoi(mysql)
	}
	if err != nil || !isState(state) {
		return nil
	}
	return &QueryError{state, number, errors.New(rest)}
}

// invalidElsewhere is an error that wrapped refill.ErrInvalid on another node.
type invalidElsewhere struct{ error }

func (e *invalidElsewhere) Is(target error) bool { return target == refill.ErrInvalid }
