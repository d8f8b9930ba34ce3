package data

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/draftscope/draftscope/schemas"
)

// present returns an error that wraps [ErrGone] when the dataset was deleted
// under its writer: its lock is another file than the one that is held, or its
// dataset.json is missing. What would be written now would belong to no
// dataset.
func (d *Dataset) present() error {
	if d.locked == nil {
		return nil
	}
	info, err := os.Stat(filepath.Join(d.dir, lockName))
	if err == nil && !os.SameFile(info, d.locked) {
		err = errors.New("its lock is another file")
	}
	if err == nil {
		_, err = os.Stat(filepath.Join(d.dir, manifestName))
	}
	if err != nil {
		return fmt.Errorf("%w: %s was deleted or replaced while it was written (%w)", ErrGone, d.dir, err)
	}
	return nil
}

// Held lists the run's sequences whose capture is durable, or durably set
// aside.
func (s *CaptureSink) Held() (map[string]bool, error) {
	return s.d.held(s.run.Name, nil)
}

// HeldOf lists the run's sequences whose results by all of the drafters are
// durable, or durably set aside.
func (s *ResultSink) HeldOf(drafters []string) (map[string]bool, error) {
	return s.d.held(s.run.Name, drafters)
}

// Held lists the sequences of a run whose capture is durable, or durably set
// aside.
func (d *Dataset) Held(run string) (map[string]bool, error) { return d.held(run, nil) }

// held is about captures without drafters.
func (d *Dataset) held(run string, drafters []string) (map[string]bool, error) {
	whos := drafters
	if len(drafters) == 0 {
		whos = []string{""}
	}
	count := map[string]int{}
	for _, who := range whos {
		stored, err := d.durable(run, who)
		if err != nil {
			return nil, err
		}
		for seq := range stored {
			count[seq]++
		}
	}
	held := map[string]bool{}
	for seq, n := range count {
		if n == len(whos) {
			held[seq] = true
		}
	}
	faults, err := d.Faults(run)
	if err != nil {
		return nil, fmt.Errorf("listing what was set aside of run %s: %w", run, err)
	}
	for _, f := range faults {
		if f.SeqID != "" && setsAside(f, len(drafters) > 0) {
			held[f.SeqID] = true
		}
	}
	return held, nil
}

// setsAside says that a sequence with this fault is not stored. A capture is
// stored in spite of what is wrong with its results.
func setsAside(f schemas.Fault, results bool) bool {
	if f.Check == "K15" || strings.HasSuffix(f.Detail, "stored as NULL") {
		return false
	}
	return results || !strings.HasPrefix(f.Detail, "results: ") && !strings.HasPrefix(f.Detail, "drafter ")
}
