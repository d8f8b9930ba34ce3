package data

import (
	"encoding/binary"
	"maps"
	"math"
	"reflect"
	"slices"
	"time"

	"github.com/cespare/xxhash/v2"
)

// rowHash digests rows: what is stored of a sequence has one digest, however
// its rows were cut into batches. Times do not enter it, since a repeated
// capture differs in them and in nothing else.
type rowHash struct {
	h   *xxhash.Digest
	buf []byte
}

func newRowHash() *rowHash { return &rowHash{h: xxhash.New()} }

func (r *rowHash) sum() uint64 { return r.h.Sum64() }

// uint adds a number.
func (r *rowHash) uint(v uint64) {
	r.buf = binary.LittleEndian.AppendUint64(r.buf[:0], v)
	r.h.Write(r.buf)
}

// addRows adds rows, field by field in the order of their struct.
func addRows[T any](r *rowHash, rows []T) {
	for i := range rows {
		r.buf = appendValue(r.buf[:0], reflect.ValueOf(&rows[i]).Elem())
		r.h.Write(r.buf)
	}
}

var timeType = reflect.TypeFor[time.Time]()

func appendValue(dst []byte, v reflect.Value) []byte {
	if v.Type() == timeType {
		return dst
	}
	switch v.Kind() {
	case reflect.Struct:
		for _, field := range v.Fields() {
			dst = appendValue(dst, field)
		}
	case reflect.Pointer:
		if v.IsNil() {
			return append(dst, 0)
		}
		return appendValue(append(dst, 1), v.Elem())
	case reflect.String:
		dst = binary.LittleEndian.AppendUint32(dst, uint32(v.Len()))
		dst = append(dst, v.String()...)
	case reflect.Bool:
		if v.Bool() {
			return append(dst, 1)
		}
		return append(dst, 0)
	case reflect.Int32, reflect.Int64:
		dst = binary.LittleEndian.AppendUint64(dst, uint64(v.Int()))
	case reflect.Float32:
		dst = binary.LittleEndian.AppendUint32(dst, math.Float32bits(float32(v.Float())))
	case reflect.Slice:
		dst = binary.LittleEndian.AppendUint32(dst, uint32(v.Len()))
		for i := range v.Len() {
			dst = appendValue(dst, v.Index(i))
		}
	case reflect.Map: // of strings
		m := v.Interface().(map[string]string)
		dst = binary.LittleEndian.AppendUint32(dst, uint32(len(m)))
		for _, k := range sorted(m) {
			dst = appendValue(dst, reflect.ValueOf(k))
			dst = appendValue(dst, reflect.ValueOf(m[k]))
		}
	}
	return dst
}

// sorted lists a map's keys in order.
func sorted[M ~map[string]V, V any](m M) []string {
	return slices.Sorted(maps.Keys(m))
}
