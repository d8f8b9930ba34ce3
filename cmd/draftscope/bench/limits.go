package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"time"
)

// The limits are what this machine can do at all, measured between the stages
// that are held against them.

const (
	hotBlock   = 1_000_000
	largeBlock = 64 << 20
	moment     = 250 * time.Millisecond // how long what needs no volume is repeated
)

// repeat calls f for a moment, once at least, and returns the bytes it says
// to have handled.
func repeat(f func() (int64, error)) (int64, error) {
	var total int64
	for end := time.Now().Add(moment); ; {
		n, err := f()
		total += n
		if err != nil || !time.Now().Before(end) {
			return total, err
		}
	}
}

// copyBlocks copies blocks of the given size. A hot block stays in a cache.
func copyBlocks(size int) func(context.Context) (int64, error) {
	return func(context.Context) (int64, error) {
		from, to := make([]byte, size), make([]byte, size)
		for i := range from {
			from[i] = byte(i)
		}
		copy(to, from) // its pages are there now
		return repeat(func() (int64, error) { return int64(copy(to, from)), nil })
	}
}

// writeDisk writes a file through the page cache and syncs it.
func (b *bench) writeDisk(ctx context.Context) (n int64, err error) {
	f, err := os.Create(filepath.Join(b.work, "disk"))
	if err != nil {
		return 0, fmt.Errorf("measuring the disk: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close(), os.Remove(f.Name())) }()
	block := make([]byte, 8<<20)
	for i, s := range b.pool.raw {
		copy(block[i*len(s)%(len(block)-len(s)+1):], s)
	}
	for n < b.cfg.Bytes && ctx.Err() == nil {
		m, err := f.Write(block)
		n += int64(m)
		if err != nil {
			return n, fmt.Errorf("measuring the disk: %w", err)
		}
	}
	return n, f.Sync()
}

// loopback sends messages' worth of bytes through a TCP connection of this
// machine with itself.
func (b *bench) loopback(ctx context.Context) (n int64, err error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("measuring loopback: %w", err)
	}
	defer l.Close()
	sent := make(chan error, 1)
	go func() {
		sent <- func() error {
			c, err := new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
			if err != nil {
				return err
			}
			block := make([]byte, hotBlock)
			for left := b.cfg.Bytes; left > 0 && err == nil && ctx.Err() == nil; left -= hotBlock {
				_, err = c.Write(block)
			}
			return errors.Join(err, c.Close())
		}()
	}()
	c, err := l.Accept()
	if err != nil {
		return 0, errors.Join(fmt.Errorf("measuring loopback: %w", err), <-sent)
	}
	into := make([]byte, hotBlock)
	for err == nil {
		var m int
		m, err = c.Read(into)
		n += int64(m)
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return n, errors.Join(err, c.Close(), <-sent)
}
