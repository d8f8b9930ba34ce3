//go:build cgo

package query

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"testing"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/data/query/querytest"
	"github.com/draftscope/draftscope/schemas"
)

// tensors reads the F32 tensors of a small safetensors file.
func tensors(t *testing.T, raw []byte) map[string][]float32 {
	t.Helper()
	n := binary.LittleEndian.Uint64(raw)
	var header map[string]struct {
		Offsets [2]int `json:"data_offsets"`
	}
	if err := json.Unmarshal(raw[8:8+n], &header); err != nil {
		t.Fatal(err)
	}
	out := make(map[string][]float32)
	for name, h := range header {
		data := raw[8+int(n)+h.Offsets[0] : 8+int(n)+h.Offsets[1]]
		for i := 0; i < len(data); i += 4 {
			out[name] = append(out[name], math.Float32frombits(binary.LittleEndian.Uint32(data[i:])))
		}
	}
	return out
}

func logSoftmax(logits []float32) []float64 {
	var sum float64
	for _, v := range logits {
		sum += math.Exp(float64(v))
	}
	out := make([]float64, len(logits))
	for i, v := range logits {
		out[i] = float64(v) - math.Log(sum)
	}
	return out
}

// Random logits, target logits and a mask, and what another project's training
// code makes of them: every loss and weighting must come out of SQL the same.
func TestLossesEqualTheReferenceOnRandomLogits(t *testing.T) {
	var ref struct {
		BlockSize int `json:"block_size"`
		Cases     []struct {
			Loss   string             `json:"loss_fn"`
			Weight string             `json:"weight"`
			Gamma  float64            `json:"gamma"`
			Want   float64            `json:"loss"`
			Metric map[string]float64 `json:"metrics"`
		} `json:"cases"`
	}
	if err := json.Unmarshal(demotest.Read(t, "golden/training_metrics.json"), &ref); err != nil {
		t.Fatal(err)
	}
	in := tensors(t, demotest.Read(t, "golden/training_metrics.safetensors"))
	vocab := len(in["logits"]) / len(in["loss_mask"])
	var rows []schemas.Slot
	for i, mask := range in["loss_mask"] {
		k := i % ref.BlockSize
		if k == 0 {
			continue
		}
		q, p := logSoftmax(in["logits"][i*vocab:(i+1)*vocab]), logSoftmax(in["target_logits"][i*vocab:(i+1)*vocab])
		label, draft := 0, 0
		var kl, rkl, jsd, alpha float64
		for v := range vocab {
			if p[v] > p[label] {
				label = v
			}
			if q[v] > q[draft] {
				draft = v
			}
			pv, qv := math.Exp(p[v]), math.Exp(q[v])
			m := math.Log((pv + qv) / 2)
			kl, rkl = kl+pv*(p[v]-q[v]), rkl+qv*(q[v]-p[v])
			jsd += (pv*(p[v]-m) + qv*(q[v]-m)) / 2
			alpha += min(pv, qv)
		}
		s := schemas.Slot{
			SeqID: "s", Anchor: int32(i / ref.BlockSize), Slot: int32(k), Label: new(int32(label)), DraftToken: int32(draft), LossMask: new(mask == 1),
			CE: new(float32(-q[label])), KL: new(float32(kl)), RKL: new(float32(rkl)), JSD: new(float32(jsd)), TV: new(float32(1 - alpha)),
		}
		if mask == 1 {
			s.Hit = new(label == draft)
		}
		rows = append(rows, s)
	}
	dir := t.TempDir()
	querytest.Write(t, dir, "slots/run=r/drafter=d/p.parquet", rows...)
	db := openDB(t, dir)
	for _, c := range ref.Cases {
		objective, weighting := c.Loss, "exp"
		if objective == "kl_div" {
			objective = "kl"
		}
		if c.Weight == "dpace" {
			weighting = "dpace"
		}
		wantRows(t, db, 1e-5, fmt.Sprintf("SELECT slots, loss FROM loss('%s', '%s', %g, 'count')", objective, weighting, c.Gamma),
			row(int64(c.Metric["full_acc_total"]), c.Want))
	}
	m := ref.Cases[0].Metric
	for k := 1; k < ref.BlockSize; k++ {
		wantRows(t, db, 0, fmt.Sprintf("SELECT hits, scored FROM slot_accuracy WHERE slot = %d", k),
			row(int64(m[fmt.Sprintf("position_%d_acc_sum", k)]), int64(m[fmt.Sprintf("position_%d_acc_total", k)])))
	}
	wantRows(t, db, 1e-6, "SELECT eal FROM eal", row(m["eal_sum"]))
}
