package pdtransfer

import (
	"encoding/binary"
	"fmt"
	"math"
	"regexp"
	"unicode/utf8"
)

// FieldError says which field of a frame is wrong, as a Reject names it.
type FieldError struct {
	Field string
	Text  string
}

func (e *FieldError) Error() string { return e.Field + ": " + e.Text }

func wrong(field, format string, values ...any) error {
	return &FieldError{field, fmt.Sprintf(format, values...)}
}

type kind byte

const (
	isNil kind = iota
	isBool
	isInt
	isFloat
	isStr
	isBin
	isArray
)

// value is one msgpack value. An int is number, or below 0 -number.
type value struct {
	kind   kind
	flag   bool
	below  bool
	number uint64
	float  float64
	bytes  []byte
	items  []value
}

// reader checks the limits of a frame while it reads, before it allocates what a header promises.
type reader struct {
	in             []byte
	arrays, values int
	longest        int
}

const depthMax = 1024

func parse(frame []byte) (value, error) {
	if len(frame) > FrameBytesMax {
		return value{}, wrong("frame", "%d bytes, the limit is %d", len(frame), FrameBytesMax)
	}
	longest := len(frame) / PlaneBytesMin
	if longest > PlanesMax {
		longest = PlanesMax
	}
	if longest < PeersMax {
		longest = PeersMax
	}
	r := reader{in: frame, longest: longest}
	v, err := r.value(0)
	if err == nil && len(r.in) > 0 {
		err = wrong("frame", "%d bytes after its end", len(r.in))
	}
	return v, err
}

func (r *reader) take(count uint64) ([]byte, error) {
	if count > uint64(len(r.in)) {
		return nil, wrong("frame", "it ends early")
	}
	taken := r.in[:count]
	r.in = r.in[count:]
	return taken, nil
}

func (r *reader) number(bytes uint64) (uint64, error) {
	taken, err := r.take(bytes)
	if err != nil {
		return 0, err
	}
	var number uint64
	for _, each := range taken {
		number = number<<8 | uint64(each)
	}
	return number, nil
}

func signed(number int64) value {
	if number < 0 {
		return value{kind: isInt, below: true, number: uint64(-number)}
	}
	return value{kind: isInt, number: uint64(number)}
}

func (r *reader) value(depth int) (value, error) {
	head, err := r.take(1)
	if err != nil {
		return value{}, err
	}
	first := head[0]
	switch {
	case first <= 0x7f:
		return value{kind: isInt, number: uint64(first)}, nil
	case first >= 0xe0:
		return signed(int64(int8(first))), nil
	case first>>4 == 0x9:
		return r.array(uint64(first&0x0f), depth)
	case first>>5 == 0x5:
		return r.text(isStr, uint64(first&0x1f))
	}
	switch first {
	case 0xc0:
		return value{kind: isNil}, nil
	case 0xc2, 0xc3:
		return value{kind: isBool, flag: first == 0xc3}, nil
	case 0xca, 0xcb:
		bits, err := r.number(4 << (first - 0xca))
		if err != nil {
			return value{}, err
		}
		if first == 0xca {
			return value{kind: isFloat, float: float64(math.Float32frombits(uint32(bits)))}, nil
		}
		return value{kind: isFloat, float: math.Float64frombits(bits)}, nil
	case 0xcc, 0xcd, 0xce, 0xcf:
		number, err := r.number(1 << (first - 0xcc))
		return value{kind: isInt, number: number}, err
	case 0xd0, 0xd1, 0xd2, 0xd3:
		number, err := r.number(1 << (first - 0xd0))
		shift := 64 - 8<<(first-0xd0)
		return signed(int64(number<<shift) >> shift), err
	case 0xc4, 0xc5, 0xc6:
		count, err := r.number(1 << (first - 0xc4))
		if err != nil {
			return value{}, err
		}
		return r.text(isBin, count)
	case 0xd9, 0xda, 0xdb:
		count, err := r.number(1 << (first - 0xd9))
		if err != nil {
			return value{}, err
		}
		return r.text(isStr, count)
	case 0xdc, 0xdd:
		count, err := r.number(2 << (first - 0xdc))
		if err != nil {
			return value{}, err
		}
		return r.array(count, depth)
	}
	return value{}, wrong("frame", "%#x begins no value of version 1", first)
}

func (r *reader) text(of kind, count uint64) (value, error) {
	taken, err := r.take(count)
	if err == nil && of == isStr && !utf8.Valid(taken) {
		err = wrong("frame", "a str that is not UTF-8")
	}
	return value{kind: of, bytes: taken}, err
}

func (r *reader) array(count uint64, depth int) (value, error) {
	r.arrays++
	if depth == depthMax || count > uint64(r.longest) || r.arrays > ArraysMax {
		return value{}, wrong("frame", "an array of %d values, %d deep", count, depth)
	}
	if r.values += int(count); r.values > ValuesMax {
		return value{}, wrong("frame", "more than %d values", ValuesMax)
	}
	v := value{kind: isArray, items: make([]value, count)}
	for at := range v.items {
		var err error
		if v.items[at], err = r.value(depth + 1); err != nil {
			return value{}, err
		}
	}
	return v, nil
}

func (v value) toBool(field string) (bool, error) {
	if v.kind != isBool {
		return false, wrong(field, "expected bool")
	}
	return v.flag, nil
}

func (v value) toInt(field string, least, most uint64) (uint64, error) {
	if v.kind != isInt || v.below || v.number < least || v.number > most {
		return 0, wrong(field, "expected int, %d to %d", least, most)
	}
	return v.number, nil
}

func (v value) toFloat(field string, least, most float64, above bool) (float64, error) {
	float := v.float
	switch {
	case v.kind == isInt && v.below:
		float = -float64(v.number)
	case v.kind == isInt:
		float = float64(v.number)
	case v.kind != isFloat:
		return 0, wrong(field, "expected float")
	}
	// Of a NaN every comparison is false.
	if !(float >= least && float <= most) || above && float == least {
		return 0, wrong(field, "expected float, %v to %v", least, most)
	}
	return float, nil
}

func (v value) toStr(field string, least, most int, oneOf ...string) (string, error) {
	if v.kind != isStr {
		return "", wrong(field, "expected str")
	}
	text := string(v.bytes)
	for _, each := range oneOf {
		if each == text {
			return text, nil
		}
	}
	if count := utf8.RuneCount(v.bytes); oneOf != nil || count < least || count > most {
		return "", wrong(field, "expected str of %d to %d characters, or one of %q", least, most, oneOf)
	}
	return text, nil
}

func (v value) toStrOf(field, pattern string, least, most int) (string, error) {
	text, err := v.toStr(field, least, most)
	if err == nil && !regexp.MustCompile("^(?:"+pattern+")$").MatchString(text) {
		return "", wrong(field, "expected str of the form %s", pattern)
	}
	return text, err
}

func (v value) toBin(field string, least, most int) ([]byte, error) {
	if v.kind != isBin || len(v.bytes) < least || len(v.bytes) > most {
		return nil, wrong(field, "expected bin of %d to %d bytes", least, most)
	}
	return v.bytes, nil
}

func (v value) toArray(field string, least, most int) ([]value, error) {
	if v.kind != isArray || len(v.items) < least || len(v.items) > most {
		return nil, wrong(field, "expected array of %d to %d", least, most)
	}
	return v.items, nil
}

func (v value) toStruct(field string) ([]value, error) {
	if v.kind != isArray {
		return nil, wrong(field, "expected array of fields")
	}
	return v.items, nil
}

// Each of these appends one value in the shortest form of its type.

func putBool(out []byte, flag bool) []byte {
	if flag {
		return append(out, 0xc3)
	}
	return append(out, 0xc2)
}

func putInt(out []byte, number uint64) []byte {
	switch {
	case number <= 0x7f:
		return append(out, byte(number))
	case number <= math.MaxUint8:
		return append(out, 0xcc, byte(number))
	case number <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(out, 0xcd), uint16(number))
	case number <= math.MaxUint32:
		return binary.BigEndian.AppendUint32(append(out, 0xce), uint32(number))
	}
	return binary.BigEndian.AppendUint64(append(out, 0xcf), number)
}

func putFloat(out []byte, float float64) []byte {
	return binary.BigEndian.AppendUint64(append(out, 0xcb), math.Float64bits(float))
}

func putSize(out []byte, count int, eight, sixteen, thirtyTwo byte) []byte {
	switch {
	case count <= math.MaxUint8 && eight != 0:
		return append(out, eight, byte(count))
	case count <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(out, sixteen), uint16(count))
	}
	return binary.BigEndian.AppendUint32(append(out, thirtyTwo), uint32(count))
}

func putStr(out []byte, text string) []byte {
	if len(text) < 32 {
		return append(append(out, 0xa0|byte(len(text))), text...)
	}
	return append(putSize(out, len(text), 0xd9, 0xda, 0xdb), text...)
}

func putBin(out []byte, bytes []byte) []byte {
	return append(putSize(out, len(bytes), 0xc4, 0xc5, 0xc6), bytes...)
}

func putArray(out []byte, count int) []byte {
	if count < 16 {
		return append(out, 0x90|byte(count))
	}
	return putSize(out, count, 0, 0xdc, 0xdd)
}
