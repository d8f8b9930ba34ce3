package query

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

var (
	// firstWord skips blanks, comments and parentheses.
	firstWord = regexp.MustCompile(`(?s)^(?:\s|\(|--[^\n]*(?:\n|$)|/\*.*?\*/)*(\w*)`)
	// explained is what may stand between EXPLAIN and its statement.
	explained = regexp.MustCompile(`(?is)^(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/|analyze\b|\([^)]*\))*`)
)

var readingWords = []string{"SELECT", "FROM", "WITH", "VALUES", "TABLE", "DESCRIBE", "DESC", "SUMMARIZE", "SHOW", "PIVOT", "UNPIVOT"}

// reads refuses SQL whose first word does not begin a reading statement. It
// looks through EXPLAIN, since EXPLAIN ANALYZE runs what it explains.
func reads(sql string) error {
	m := firstWord.FindStringSubmatch(sql)
	switch word := strings.ToUpper(m[1]); {
	case word == "":
		return fmt.Errorf("%w: this is none", ErrStatement)
	case word == "EXPLAIN":
		rest := sql[len(m[0]):]
		return reads(rest[len(explained.FindString(rest)):])
	case !slices.Contains(readingWords, word):
		return fmt.Errorf("%w: it begins with %s, want SELECT, FROM, WITH, DESCRIBE, SUMMARIZE, SHOW or EXPLAIN", ErrStatement, word)
	}
	return nil
}
