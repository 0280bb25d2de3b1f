package refill

import "testing"

func TestKinds(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{second(codecFor[string](nil)), "raw string"},
		{second(codecFor[[]byte](nil)), "raw []uint8"},
		{second(codecFor[*Config](nil)), "json *refill.Config"},
		{second(codecFor[string](jsonCodec{})), "json string"},
	} {
		if c.got != c.want {
			t.Errorf("got %q, want %q", c.got, c.want)
		}
	}
}

func second(_ Codec, kind string) string { return kind }
