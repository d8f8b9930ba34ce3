package query

import (
	"encoding/json"
	"os"
	"path/filepath"

	"github.com/draftscope/draftscope/schemas"
)

// replacedMarkers are the markers of groups that a compaction has copied into
// a new one and not yet removed: what they commit is there twice. They stop
// counting when the new group's marker is there.
func replacedMarkers(dir string) map[string]bool {
	var journal struct {
		Run string   `json:"run"`
		New string   `json:"new"`
		Old []string `json:"old"`
	}
	raw, err := os.ReadFile(filepath.Join(dir, "compaction.json"))
	if err != nil || json.Unmarshal(raw, &journal) != nil {
		return nil
	}
	marker := func(name string) string {
		return filepath.Join(dir, schemas.TableSequences, "run="+journal.Run, name)
	}
	if _, err := os.Stat(marker(journal.New)); err != nil {
		return nil
	}
	gone := map[string]bool{}
	for _, name := range journal.Old {
		gone[marker(name)] = true
	}
	return gone
}
