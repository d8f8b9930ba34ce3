package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// interruptedBy is why a command was told to end.
type interruptedBy struct{ sig syscall.Signal }

func (i interruptedBy) Error() string {
	name := "SIGTERM"
	if i.sig == syscall.SIGINT {
		name = "an interrupt"
	}
	return "stopped by " + name + " before it was done"
}

// stoppable ends a command that only reads, or whose work is thrown away when
// it is not done, at the first interrupt or SIGTERM; the second one kills it.
// Both are heard where a shell had them ignored too, as it does for what a
// script puts into the background.
func stoppable(ctx context.Context) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, os.Interrupt, syscall.SIGTERM)
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		defer signal.Stop(caught)
		select {
		case sig := <-caught:
			number, _ := sig.(syscall.Signal)
			cancel(interruptedBy{number})
		case <-done:
		}
	}()
	return ctx, func() {
		close(done)
		<-ended
		cancel(nil)
	}
}

// stopped is the error of a command that was told to end, and did.
func stopped(ctx context.Context, err error) error {
	why, ok := errors.AsType[interruptedBy](context.Cause(ctx))
	if err == nil || !ok {
		return err
	}
	return exitError{128 + int(why.sig), fmt.Errorf("%w; nothing was changed, and the same command begins again", why)}
}
