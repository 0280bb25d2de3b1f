package sqlxrefill

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

// This file checks that a text only reads. A text that writes would write only when nothing is cached, and its callers
// would share one write. The check guards against mistakes. It cannot look into functions and rules of the database.

// texts remembers which texts were checked, so that a hit costs one look-up.
type texts struct {
	dialect dialect
	checked sync.Map // text -> error, or nil
	n       atomic.Int32
}

// maxTexts bounds the memory of texts. A program that puts values into its texts has more texts than that. These are
// checked at each call.
const maxTexts = 4096

// check returns an error if the text is empty or writes.
func (t *texts) check(text string) error {
	if known, ok := t.checked.Load(text); ok {
		err, _ := known.(error)
		return err
	}
	err := t.dialect.check(text)
	if t.n.Load() < maxTexts {
		t.n.Add(1)
		t.checked.Store(strings.Clone(text), err)
	}
	return err
}

// dialect is how a database reads texts.
type dialect struct{ mysql bool }

func dialectOf(driverName string) dialect {
	name := strings.ToLower(driverName)
	return dialect{mysql: strings.Contains(name, "mysql") || strings.Contains(name, "maria")}
}

// readers are the words with which a statement that reads may begin.
var readers = []string{"SELECT", "WITH", "VALUES", "TABLE", "SHOW", "DESCRIBE", "DESC", "EXPLAIN"}

// writers are the words with which a statement, or a part of a WITH, writes.
var writers = []string{"INSERT", "UPDATE", "DELETE", "MERGE"}

// writingFunctions change data, locks or the session, whatever the rest of the text says.
var writingFunctions = []string{
	"NEXTVAL", "SETVAL", "SET_CONFIG", "PG_NOTIFY", "PG_CANCEL_BACKEND", "PG_TERMINATE_BACKEND",
	"PG_ADVISORY_LOCK", "PG_ADVISORY_LOCK_SHARED", "PG_ADVISORY_XACT_LOCK", "PG_ADVISORY_XACT_LOCK_SHARED",
	"PG_TRY_ADVISORY_LOCK", "PG_TRY_ADVISORY_LOCK_SHARED", "PG_TRY_ADVISORY_XACT_LOCK",
	"PG_TRY_ADVISORY_XACT_LOCK_SHARED", "PG_ADVISORY_UNLOCK", "PG_ADVISORY_UNLOCK_ALL", "PG_ADVISORY_UNLOCK_SHARED",
	"LO_CREATE", "LO_CREAT", "LO_IMPORT", "LO_UNLINK", "LO_FROM_BYTEA", "LO_PUT", "DBLINK_EXEC",
	"GET_LOCK", "RELEASE_LOCK", "RELEASE_ALL_LOCKS",
}

func (d dialect) check(text string) error {
	l := lexer{text: text, mysql: d.mysql}
	var before, last, word string // the last three words or signs
	first, starts := "", true     // starts: the next word begins a statement
	for {
		before, last = last, word
		if word = l.next(); word == "" {
			break
		}
		switch {
		case word == ";":
			starts = true
		case starts && word == "(":
		case starts:
			if starts, first = false, word; !slices.Contains(readers, word) {
				return writes(word)
			}
		case first == "EXPLAIN" && (slices.Contains(readers, word) || slices.Contains(writers, word)):
			starts, first = false, word // EXPLAIN ANALYZE carries its statement out
			if slices.Contains(writers, word) {
				return writes(word)
			}
		case slices.Contains(writers, last) && word != "(" && (before == "(" || before == ")"):
			return writes(last)
		case word == "INTO", slices.Contains(writingFunctions, word):
			return writes(word)
		case last == "FOR" && (word == "UPDATE" || word == "SHARE" || word == "NO" || word == "KEY"):
			return writes("FOR " + word)
		case before == "NEXT" && last == "VALUE" && word == "FOR", before == "LOCK" && last == "IN" && word == "SHARE":
			return writes(before + " " + last + " " + word)
		}
	}
	if first == "" {
		return invalid("query", "empty")
	}
	return nil
}

func writes(word string) error {
	return invalid("query", "%q may write, lock or change the session; run such a text through DB(), not the cache", word)
}

// lexer splits a text into words in upper case and signs. It skips white space, comments, strings and quoted names.
type lexer struct {
	text  string
	at    int
	mysql bool
}

// next returns the next word or sign, and "" at the end.
func (l *lexer) next() string {
	for l.at < len(l.text) {
		rest := l.text[l.at:]
		c := rest[0]
		switch {
		case c == ' ' || '\t' <= c && c <= '\r':
			l.at++
		case l.comment(rest):
		case c == '\'' || c == '"' || c == '`':
			l.quoted(c, l.mysql && c != '`')
		case (c == 'e' || c == 'E') && len(rest) > 1 && rest[1] == '\'' && !l.mysql:
			l.at++
			l.quoted('\'', true)
		case c == '$' && !l.mysql && l.dollarQuoted(rest):
		case inWord(c):
			n := 1
			for n < len(rest) && inWord(rest[n]) {
				n++
			}
			l.at += n
			return strings.ToUpper(rest[:n])
		default:
			l.at++
			return rest[:1]
		}
	}
	return ""
}

func inWord(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '_' || c == '$' || c >= 0x80
}

// comment skips a comment at the beginning of rest. In MySQL, /*! … */ is no comment but code. There -- begins a
// comment only before white space, and # begins one as well.
func (l *lexer) comment(rest string) bool {
	switch {
	case strings.HasPrefix(rest, "--") && (!l.mysql || len(rest) == 2 || rest[2] <= ' '),
		l.mysql && rest[0] == '#':
		if end := strings.IndexByte(rest, '\n'); end >= 0 {
			l.at += end + 1
		} else {
			l.at = len(l.text)
		}
	case l.mysql && (strings.HasPrefix(rest, "/*!") || strings.HasPrefix(rest, "/*M!")):
		l.at += strings.IndexByte(rest, '!') + 1
		for l.at < len(l.text) && '0' <= l.text[l.at] && l.text[l.at] <= '9' {
			l.at++
		}
	case l.mysql && strings.HasPrefix(rest, "*/"):
		l.at += 2
	case strings.HasPrefix(rest, "/*"):
		l.at += commentLength(rest, !l.mysql)
	default:
		return false
	}
	return true
}

// commentLength returns the length of the comment at the beginning of s. In PostgreSQL comments nest.
func commentLength(s string, nests bool) int {
	depth := 1
	for i := 2; i < len(s)-1; i++ {
		switch {
		case s[i] == '*' && s[i+1] == '/':
			if i++; depth == 1 || !nests {
				return i + 1
			}
			depth--
		case s[i] == '/' && s[i+1] == '*':
			depth++
			i++
		}
	}
	return len(s)
}

// quoted skips a string or a quoted name. Two quotes in a row stand for one.
func (l *lexer) quoted(quote byte, backslash bool) {
	for l.at++; l.at < len(l.text); l.at++ {
		switch c := l.text[l.at]; {
		case c == '\\' && backslash:
			l.at++
		case c == quote && l.at+1 < len(l.text) && l.text[l.at+1] == quote:
			l.at++
		case c == quote:
			l.at++
			return
		}
	}
	l.at = len(l.text)
}

// dollarQuoted skips a string of PostgreSQL in dollar quotes, such as $tag$ … $tag$. A parameter such as $1 is none.
func (l *lexer) dollarQuoted(rest string) bool {
	n := 1
	for n < len(rest) && rest[n] != '$' && inWord(rest[n]) {
		n++
	}
	if n == len(rest) || rest[n] != '$' || '0' <= rest[1] && rest[1] <= '9' {
		return false
	}
	tag := rest[:n+1]
	if end := strings.Index(rest[n+1:], tag); end >= 0 {
		l.at += n + 1 + end + len(tag)
	} else {
		l.at = len(l.text)
	}
	return true
}
