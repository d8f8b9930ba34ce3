package files

import (
	"encoding/json"
	"errors"
	"io"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/ipc"
	"github.com/apache/arrow/go/v17/arrow/memory"
)

// sideSet writes ids and masks as Hugging Face's library datasets stores
// them: an Arrow stream, and two JSON files that name and describe it.
func (w *Writer) sideSet() error {
	whole := map[string]any{"dtype": "int64", "_type": "Value"}
	features := map[string]any{
		"input_ids": map[string]any{"feature": whole, "_type": "List"},
		"loss_mask": map[string]any{"feature": whole, "_type": "List"},
		"seq_len":   whole,
	}
	about, err := json.Marshal(map[string]any{"info": map[string]any{"features": features}})
	if err != nil {
		return err
	}
	md := arrow.NewMetadata([]string{"huggingface"}, []string{string(about)})
	list := arrow.ListOf(arrow.PrimitiveTypes.Int64)
	schema := arrow.NewSchema([]arrow.Field{
		{Name: "input_ids", Type: list, Nullable: true},
		{Name: "loss_mask", Type: list, Nullable: true},
		{Name: "seq_len", Type: arrow.PrimitiveTypes.Int64, Nullable: true},
	}, &md)
	const name = "data-00000-of-00001.arrow"
	err = w.file(name, func(out io.Writer) error { return writeSide(out, schema, w.side) })
	if err != nil {
		return err
	}
	// With the format torch, columns are read as tensors, which speculators'
	// ArrowDataset compares with those of the samples.
	for file, content := range map[string]any{
		"state.json": map[string]any{
			"_data_files": []any{map[string]any{"filename": name}}, "_fingerprint": "draftscope", "_format_columns": nil,
			"_format_kwargs": map[string]any{}, "_format_type": "torch", "_output_all_columns": false, "_split": nil,
		},
		"dataset_info.json": map[string]any{"citation": "", "description": "", "features": features, "homepage": "", "license": ""},
	} {
		raw, err := json.MarshalIndent(content, "", "  ")
		if err != nil {
			return err
		}
		if err := w.file(file, func(out io.Writer) error { _, err := out.Write(raw); return err }); err != nil {
			return err
		}
	}
	return nil
}

func writeSide(out io.Writer, schema *arrow.Schema, side []sideRow) error {
	b := array.NewRecordBuilder(memory.NewGoAllocator(), schema)
	defer b.Release()
	ids, masks := b.Field(0).(*array.ListBuilder), b.Field(1).(*array.ListBuilder)
	for _, row := range side {
		ids.Append(true)
		masks.Append(true)
		for i, id := range row.ids {
			ids.ValueBuilder().(*array.Int64Builder).Append(int64(id))
			bit := int64(0)
			if row.mask[i] {
				bit = 1
			}
			masks.ValueBuilder().(*array.Int64Builder).Append(bit)
		}
		b.Field(2).(*array.Int64Builder).Append(int64(len(row.ids)))
	}
	rec := b.NewRecord()
	defer rec.Release()
	w := ipc.NewWriter(out, ipc.WithSchema(schema))
	return errors.Join(w.Write(rec), w.Close())
}
