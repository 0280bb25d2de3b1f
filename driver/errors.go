package driver

import (
	"errors"
	"fmt"
)

// ErrInvalid is wrapped by every error about an input. It is the same value as refill.ErrInvalid.
var ErrInvalid = errors.New("refill: invalid")

// Invalid returns an error that wraps [ErrInvalid] and names the field that is wrong.
func Invalid(field, format string, args ...any) error {
	return fmt.Errorf("%w: %s: %s", ErrInvalid, field, fmt.Sprintf(format, args...))
}
