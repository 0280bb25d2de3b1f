package refill

import (
	"strings"
	"testing"
)

func TestNames(t *testing.T) {
	for _, bad := range []string{"", "a:b", ":", "a/b", "a b", "ä", "{a}", strings.Repeat("a", 65)} {
		if checkName(bad) == nil {
			t.Errorf("checkName(%q) accepted the name, want an error", bad)
		}
	}
	for _, good := range []string{"a", "product", "Product_v2.price-eur", strings.Repeat("a", 64)} {
		if err := checkName(good); err != nil {
			t.Errorf("checkName(%q) = %v, want nil", good, err)
		}
	}
}
