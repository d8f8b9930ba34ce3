// Package drafter runs speculative drafters over captured states and scores
// what they draft.
//
// A drafter guesses the B-1 tokens after an anchor, the last known token, in
// one pass. It reads the target's hidden states ("taps") of the positions
// strictly before the anchor, never the anchor's own: when the drafter runs
// beside an engine, the target has not processed the anchor yet.
//
// The parts, from the bottom up:
//
//	config.go, family.go, weights.go   a checkpoint becomes a Model, or is refused by name
//	dflash.go, context.go, mask.go     the DFlash family on a cuda.Device
//	anchors.go, rounds.go              where to draft, what to propose, what is accepted
//	work.go                            what all that cannot do without, for the floor
//	score.go, loss.go, metrics.go      what a draft is worth
//	stage.go, sequence.go              all of it over a stream of captured sequences
//
// Every number of a block depends on the tokens and states of its own
// sequence alone, so cutting a capture into other batches changes no bit.
package drafter
