package data

import (
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"

	"github.com/draftscope/draftscope/schemas"
)

// The partition columns stand in the paths and in no file: a reader that
// takes them from both, as pyarrow does, would find them twice.

func runDir(root, table, run string) string {
	return filepath.Join(root, table, "run="+run)
}

func drafterDir(root, table, run, drafter string) string {
	return filepath.Join(runDir(root, table, run), "drafter="+drafter)
}

// resultTables are the tables of a drafter; the last is the marker.
var resultTables = []string{schemas.TableDrafts, schemas.TableSlots, schemas.TableRounds}

// storedTables are all tables that sinks write.
var storedTables = []string{
	schemas.TableSequences, schemas.TableTokens, schemas.TableStates,
	schemas.TableDrafts, schemas.TableSlots, schemas.TableRounds, schemas.TableFaults,
}

// span is a range of a stream's own message numbers.
type span struct{ first, last uint64 }

func (s *span) add(n uint64) {
	if s.first == 0 || n < s.first {
		s.first = n
	}
	s.last = max(s.last, n)
}

// group names the files of one commit: shard, span, and a count that tells
// apart two spans of equal numbers, since a stream that was made anew counts
// from one again.
type group struct {
	shard int
	span  span
	again int
}

func (g group) suffix() string {
	s := fmt.Sprintf("%012d-%012d", g.span.first, g.span.last)
	if g.again > 0 {
		s += fmt.Sprintf("-%d", g.again+1)
	}
	return s + ".parquet"
}

// file is the name in every table but states.
func (g group) file() string { return fmt.Sprintf("part-%02d-%s", g.shard, g.suffix()) }

// statesPath is where the states of the group lie.
func (g group) statesPath(root, run string) string {
	return filepath.Join(runDir(root, schemas.TableStates, run), fmt.Sprintf("shard=%02d", g.shard), "part-"+g.suffix())
}

// capturePaths are the files of a capture's commit; the last is the marker.
func (g group) capturePaths(root, run string) []string {
	return []string{
		g.statesPath(root, run),
		filepath.Join(runDir(root, schemas.TableTokens, run), g.file()),
		filepath.Join(runDir(root, schemas.TableSequences, run), g.file()),
	}
}

// resultPaths are the files of a drafter's commit; the last is the marker.
func (g group) resultPaths(root, run, drafter string) []string {
	var paths []string
	for _, table := range resultTables {
		paths = append(paths, filepath.Join(drafterDir(root, table, run, drafter), g.file()))
	}
	return paths
}

var partPattern = regexp.MustCompile(`^part-(\d{2,})-(\d{12,})-(\d{12,})(?:-(\d+))?\.parquet$`)

// parseGroup reads a name that [group.file] wrote. Other names are not ours.
func parseGroup(name string) (g group, ok bool) {
	m := partPattern.FindStringSubmatch(name)
	if m == nil {
		return g, false
	}
	var errs [3]error
	g.shard, errs[0] = strconv.Atoi(m[1])
	g.span.first, errs[1] = strconv.ParseUint(m[2], 10, 64)
	g.span.last, errs[2] = strconv.ParseUint(m[3], 10, 64)
	if m[4] != "" {
		n, err := strconv.Atoi(m[4])
		if err != nil || n < 2 {
			return g, false
		}
		g.again = n - 1
	}
	return g, !slices.ContainsFunc(errs[:], func(err error) bool { return err != nil }) && g.file() == name
}

// reserve picks a group whose paths do not exist and that no other sink is
// about to write. The caller calls release when they do exist.
func (d *Dataset) reserve(shard int, s span, paths func(group) []string) (g group, release func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	g = group{shard: shard, span: s}
	taken := func(path string) bool { return d.reserved[path] || exists(path) }
	for slices.ContainsFunc(paths(g), taken) {
		g.again++
	}
	for _, p := range paths(g) {
		d.reserved[p] = true
	}
	return g, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		for _, p := range paths(g) {
			delete(d.reserved, p)
		}
	}
}
