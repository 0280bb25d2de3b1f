package httprefill

import (
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/refill-go/refill"
)

// failure holds what other requests may learn of a failed load, if the handler did not run for them. A failure travels
// to other nodes as the text of an error. failureOf parses that text.
type failure struct {
	status   int    // 5xx
	personal bool   // the request had credentials, so the failure may be specific to its user
	detail   string // for Config.OnEvent; other nodes get only its first line
}

const failurePrefix = "httprefill: status "

func (f *failure) Error() string {
	text := failurePrefix + strconv.Itoa(f.status)
	if f.personal {
		text += " personal"
	}
	if f.detail != "" {
		text += ": " + f.detail
	}
	return text
}

// failureOf returns the failure of a load that ran on this node or on another node.
func failureOf(e *refill.LoadError) failure {
	if own := (*failure)(nil); errors.As(e.Err, &own) {
		return *own
	}
	if e.Timeout {
		return failure{status: http.StatusGatewayTimeout}
	}
	f := failure{status: http.StatusInternalServerError}
	if text, ok := strings.CutPrefix(e.Err.Error(), failurePrefix); ok {
		text, _, _ = strings.Cut(text, ":")
		number, credentials, _ := strings.Cut(text, " ")
		if n, err := strconv.Atoi(number); err == nil && n >= 500 && n <= 599 {
			f.status = n
		}
		f.personal = credentials == "personal"
	}
	return f
}

// answerBare answers with a status alone. The answer has no body or header field that a handler wrote.
func answerBare(w http.ResponseWriter, status int, retryAfter time.Duration) {
	h := w.Header()
	if retryAfter > 0 {
		h.Set("Retry-After", strconv.FormatInt(int64((retryAfter+time.Second-1)/time.Second), 10))
	}
	h.Set("Cache-Control", "no-store")
	http.Error(w, fmt.Sprintf("%d %s", status, http.StatusText(status)), status)
}
