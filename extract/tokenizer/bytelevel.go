package tokenizer

// byteRunes spells every byte as one printable rune, the alphabet of
// byte-level vocabularies: bytes that print stand for themselves, the others
// are numbered upwards from U+0100.
var byteRunes = func() (table [256]rune) {
	next := rune(0x100)
	for b := range table {
		switch {
		case b >= '!' && b <= '~', b >= 0xa1 && b <= 0xac, b >= 0xae:
			table[b] = rune(b)
		default:
			table[b] = next
			next++
		}
	}
	return table
}()

var runeBytes = func() map[rune]byte {
	m := make(map[rune]byte, len(byteRunes))
	for b, r := range byteRunes {
		m[r] = byte(b)
	}
	return m
}()

// spelledBytes is the bytes that a token of the vocabulary stands for, false
// when it holds a rune outside the alphabet.
func spelledBytes(token string) ([]byte, bool) {
	out := make([]byte, 0, len(token))
	for _, r := range token {
		b, ok := runeBytes[r]
		if !ok {
			return nil, false
		}
		out = append(out, b)
	}
	return out, true
}
