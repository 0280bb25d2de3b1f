package driver

import (
	"errors"
	"fmt"
)

// ErrInvalid is the same value as refill.ErrInvalid. Every error about an invalid input wraps ErrInvalid.
var ErrInvalid = errors.New("refill: invalid")

// Invalid returns an error that wraps [ErrInvalid] and names the field that is wrong.
func Invalid(field, format string, args ...any) error {
	return fmt.Errorf("%w: %s: %s", ErrInvalid, field, fmt.Sprintf(format, args...))
}
