package statefile

// VecMeter measures what the column vec of rows would take in a file: it makes
// their frames, page by page, and throws them away. Page headers and levels
// are left out, about 100 bytes a page. It holds a page of captured values at
// most, and serves one goroutine.
type VecMeter struct {
	cfg  Config
	buf  []byte // captured values, less than a page of them
	size int64
}

// NewVecMeter makes a meter for rows that a [Writer] of cfg would be given.
func NewVecMeter(cfg Config) (*VecMeter, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &VecMeter{cfg: cfg.withDefaults()}, nil
}

// Add measures captured rows that follow those before.
func (m *VecMeter) Add(raw []byte) error {
	m.buf = append(m.buf, raw...)
	page, n := m.cfg.pageRows()*m.cfg.width(), 0
	for ; len(m.buf)-n >= page; n += page {
		if err := m.measure(m.buf[n : n+page]); err != nil {
			return err
		}
	}
	m.buf = append(m.buf[:0], m.buf[n:]...)
	return nil
}

// Sum measures what is left, and returns the size of all.
func (m *VecMeter) Sum() (int64, error) {
	if len(m.buf) > 0 {
		if err := m.measure(m.buf); err != nil {
			return 0, err
		}
	}
	m.buf = nil
	return m.size, nil
}

func (m *VecMeter) measure(page []byte) error {
	e, err := getEncoder()
	if err != nil {
		return err
	}
	defer encoders.Put(e)
	e.frame, err = e.appendFrame(e.frame[:0], m.cfg.DType, &pieces{rows: []Rows{{Raw: page}}}, len(page)/m.cfg.DType.Size())
	m.size += int64(len(e.frame))
	return err
}
