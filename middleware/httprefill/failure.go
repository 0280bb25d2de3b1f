package httprefill

import (
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/refill-go/refill"
)

// failure is the error of a load whose handler has failed. The answer of the handler belongs to the request that the
// handler ran for. Other requests learn from the failure only that they have no response yet.
type failure struct {
	status int    // 5xx
	detail string // for Config.OnEvent; other nodes get only its first line
}

func (f *failure) Error() string {
	text := "httprefill: status " + strconv.Itoa(f.status)
	if f.detail != "" {
		text += ": " + f.detail
	}
	return text
}

// maxLeaders is how many failed leaders a request waits for before it runs the handler itself.
const maxLeaders = 2

// leadersOf returns how many leaders a request has waited for in vain when it gets the failure e. A flight reports the
// failure of another node only after the loads of two nodes have failed, one after the other. During a back-off no
// request leads, so there is nothing to wait for.
func leadersOf(e *refill.LoadError) int {
	own := (*failure)(nil)
	if errors.As(e.Err, &own) && e.RetryAfter == 0 {
		return 1
	}
	return maxLeaders
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
