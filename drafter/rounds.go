package drafter

import (
	"slices"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/schemas"
)

// Method is one way to propose drafts: the chain, or a DDTree of a budget.
type Method struct {
	Name   string // [schemas.MethodChain] or [schemas.MethodDDTree]
	Budget int    // nodes without the root; B-1 for the chain
}

// Methods lists the chain and a DDTree for each budget, ascending, doubles
// dropped.
func Methods(blockSize int, budgets []int) []Method {
	methods := []Method{{schemas.MethodChain, blockSize - 1}}
	for _, n := range slices.Compact(slices.Sorted(slices.Values(budgets))) {
		methods = append(methods, Method{schemas.MethodDDTree, n})
	}
	return methods
}

// decoding is simulated decoding of one turn by one method.
type decoding struct {
	turn   Turn
	anchor int
	rounds []schemas.Round
}

// simulation follows the rounds of every method through a sequence. Rounds of
// one method and turn follow from each other; those of different ones do not,
// so a wave of anchors can be drafted at once.
type simulation struct {
	seq     string
	methods []Method
	byTurn  [][]decoding // by method, then by turn
}

func newSimulation(seq string, methods []Method, turns []Turn) *simulation {
	s := &simulation{seq: seq, methods: methods, byTurn: make([][]decoding, len(methods))}
	for m := range methods {
		for _, r := range turns {
			s.byTurn[m] = append(s.byTurn[m], decoding{turn: r, anchor: r.Lo})
		}
	}
	return s
}

// advance takes rounds for as long as outcomes has their anchors, and returns
// the anchors that it waits for, ascending. None means that all is done.
func (s *simulation) advance(outcomes map[int32][]cuda.Outcome) []int32 {
	var wanted []int32
	for m, method := range s.methods {
		for r := range s.byTurn[m] {
			d := &s.byTurn[m][r]
			for d.anchor < d.turn.Hi-1 {
				at, ok := outcomes[int32(d.anchor)]
				if !ok {
					wanted = append(wanted, int32(d.anchor))
					break
				}
				o := at[m]
				d.rounds = append(d.rounds, schemas.Round{
					SeqID: s.seq, Method: method.Name, Budget: int32(method.Budget),
					Anchor: int32(d.anchor), Proposed: int32(o.Proposed),
					Accepted: int32(o.Accepted), AcceptLen: int32(o.Accepted + 1), Truncated: o.Truncated,
				})
				d.anchor += o.Accepted + 1
			}
		}
	}
	slices.Sort(wanted)
	return slices.Compact(wanted)
}

// rounds lists the rounds taken, by method and then in order; their numbers
// run through all of the sequence's turns.
func (s *simulation) rounds() []schemas.Round {
	var all []schemas.Round
	for m := range s.methods {
		n := int32(0)
		for _, d := range s.byTurn[m] {
			for _, r := range d.rounds {
				r.Round = n
				n++
				all = append(all, r)
			}
		}
	}
	return all
}
