package schemas

import (
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"
)

var timeType = reflect.TypeFor[time.Time]()

// SchemaOf derives the Arrow schema of a table from its row struct. Pointer
// fields are nullable.
func SchemaOf[T any](env Envelope) *arrow.Schema {
	md := arrow.NewMetadata(env.metadata())
	return arrow.NewSchema(fieldsOf(reflect.TypeFor[T]()), &md)
}

func fieldsOf(t reflect.Type) []arrow.Field {
	fields := make([]arrow.Field, t.NumField())
	for i := range fields {
		f := t.Field(i)
		ft := f.Type
		nullable := ft.Kind() == reflect.Pointer
		if nullable {
			ft = ft.Elem()
		}
		fields[i] = arrow.Field{Name: columnName(f), Type: arrowType(ft), Nullable: nullable}
	}
	return fields
}

func columnName(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("parquet"), ",")
	return name
}

func arrowType(t reflect.Type) arrow.DataType {
	switch {
	case t == timeType:
		return arrow.FixedWidthTypes.Timestamp_us
	case t.Kind() == reflect.String:
		return arrow.BinaryTypes.String
	case t.Kind() == reflect.Bool:
		return arrow.FixedWidthTypes.Boolean
	case t.Kind() == reflect.Int32:
		return arrow.PrimitiveTypes.Int32
	case t.Kind() == reflect.Int64:
		return arrow.PrimitiveTypes.Int64
	case t.Kind() == reflect.Float32:
		return arrow.PrimitiveTypes.Float32
	case t.Kind() == reflect.Slice:
		return arrow.ListOfNonNullable(arrowType(t.Elem()))
	case t.Kind() == reflect.Map:
		return arrow.MapOf(arrowType(t.Key()), arrowType(t.Elem()))
	}
	panic(fmt.Sprintf("schemas: no column type for %s", t)) // a new row struct, not data
}

// Record builds a record of a table from rows. The caller releases it.
func Record[T any](mem memory.Allocator, env Envelope, rows []T) arrow.Record {
	b := array.NewRecordBuilder(mem, SchemaOf[T](env))
	defer b.Release()
	b.Reserve(len(rows))
	for i := range rows {
		v := reflect.ValueOf(&rows[i]).Elem()
		for c := range v.NumField() {
			appendValue(b.Field(c), v.Field(c))
		}
	}
	return b.NewRecord()
}

func appendValue(b array.Builder, v reflect.Value) {
	if v.Kind() == reflect.Pointer {
		if v.IsNil() {
			b.AppendNull()
			return
		}
		v = v.Elem()
	}
	switch b := b.(type) {
	case *array.StringBuilder:
		b.Append(v.String())
	case *array.BooleanBuilder:
		b.Append(v.Bool())
	case *array.Int32Builder:
		b.Append(int32(v.Int()))
	case *array.Int64Builder:
		b.Append(v.Int())
	case *array.Float32Builder:
		b.Append(float32(v.Float()))
	case *array.TimestampBuilder:
		b.Append(arrow.Timestamp(v.Interface().(time.Time).UnixMicro()))
	case *array.ListBuilder:
		b.Append(true)
		switch vb := b.ValueBuilder().(type) {
		case *array.Int32Builder:
			vb.AppendValues(v.Interface().([]int32), nil)
		case *array.Float32Builder:
			vb.AppendValues(v.Interface().([]float32), nil)
		default:
			panic(fmt.Sprintf("schemas: no list of %T", vb))
		}
	case *array.MapBuilder:
		b.Append(true)
		m := v.Interface().(map[string]string)
		kb, ib := b.KeyBuilder().(*array.StringBuilder), b.ItemBuilder().(*array.StringBuilder)
		for _, k := range sortedKeys(m) {
			kb.Append(k)
			ib.Append(m[k])
		}
	default:
		panic(fmt.Sprintf("schemas: no builder %T", b))
	}
}

// Rows copies a record back into rows. It refuses a record whose columns are
// not exactly T's.
func Rows[T any](rec arrow.Record) ([]T, error) {
	if want := reflect.TypeFor[T]().NumField(); int(rec.NumCols()) != want {
		return nil, fmt.Errorf("%w: %d columns, want %d", ErrRecord, rec.NumCols(), want)
	}
	return leadingRows[T](rec)
}

// leadingRows reads rows from the first columns of rec, which must be T's;
// others may follow.
func leadingRows[T any](rec arrow.Record) ([]T, error) {
	want, got := fieldsOf(reflect.TypeFor[T]()), rec.Schema().Fields()
	if len(got) < len(want) {
		return nil, fmt.Errorf("%w: %d columns, want %d", ErrRecord, len(got), len(want))
	}
	for c, f := range want {
		if got[c].Name != f.Name || !arrow.TypeEqual(got[c].Type, f.Type) {
			return nil, fmt.Errorf("%w: column %d is %s %s, want %s %s", ErrRecord, c, got[c].Name, got[c].Type, f.Name, f.Type)
		}
	}
	rows := make([]T, rec.NumRows())
	for c := range want {
		col := rec.Column(c)
		if !want[c].Nullable && col.NullN() > 0 {
			return nil, fmt.Errorf("%w: column %s holds NULL", ErrRecord, want[c].Name)
		}
		for i := range rows {
			field := reflect.ValueOf(&rows[i]).Elem().Field(c)
			if field.Kind() == reflect.Pointer {
				if col.IsNull(i) {
					continue
				}
				field.Set(reflect.New(field.Type().Elem()))
				field = field.Elem()
			}
			setValue(field, col, i)
		}
	}
	return rows, nil
}

func setValue(field reflect.Value, col arrow.Array, i int) {
	switch col := col.(type) {
	case *array.String:
		field.SetString(strings.Clone(col.Value(i)))
	case *array.Boolean:
		field.SetBool(col.Value(i))
	case *array.Int32:
		field.SetInt(int64(col.Value(i)))
	case *array.Int64:
		field.SetInt(col.Value(i))
	case *array.Float32:
		field.SetFloat(float64(col.Value(i)))
	case *array.Timestamp:
		field.Set(reflect.ValueOf(time.UnixMicro(int64(col.Value(i))).UTC()))
	case *array.List:
		lo, hi := col.ValueOffsets(i)
		switch v := col.ListValues().(type) {
		case *array.Int32:
			field.Set(reflect.ValueOf(append([]int32{}, v.Int32Values()[lo:hi]...)))
		case *array.Float32:
			field.Set(reflect.ValueOf(append([]float32{}, v.Float32Values()[lo:hi]...)))
		}
	case *array.Map:
		lo, hi := col.ValueOffsets(i)
		keys, items := col.Keys().(*array.String), col.Items().(*array.String)
		m := make(map[string]string, hi-lo)
		for j := int(lo); j < int(hi); j++ {
			m[strings.Clone(keys.Value(j))] = strings.Clone(items.Value(j))
		}
		field.Set(reflect.ValueOf(m))
	}
}
