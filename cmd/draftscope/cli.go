package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
)

// The exit codes, the same for every command.
const (
	exitOK      = 0
	exitFailed  = 1 // something broke while working
	exitUsage   = 2 // bad flags or bad input
	exitMissing = 3 // the environment lacks something: a server, a device, space
	exitPartial = 4 // done, but sequences were set aside or left for a later run
)

const usage = `draftscope: see why a speculative-decoding drafter is good or bad

usage: draftscope COMMAND [flags]

  run       capture a target's hidden states, draft on them, score, report
  capture   the same without drafters: states into a dataset
  tap       capture from a running engine as it serves
  import    read the states that another system has stored
  export    write a run as another system reads it
  replay    put a stored capture through new drafters
  serve     receive captures from other processes and store them; metrics
  draft     put a run's captures through drafters, as one of many workers
  store     write the datasets of runs on a server, without being one
  diagnose  say why a drafter is bad, with evidence
  validate  check a dataset, drafter or capture, a line a fault
  compare   hold two captures of the same ids against each other
  report    print or draw what a dataset says about its drafters
  query     ask a dataset in SQL
  inspect   say in plain words what a file or folder is
  delete    remove sequences from the streams of a run on a server
  compact   join a dataset's many small files into few large ones
  demo      replay a story: which of four drafters is bad, and why
  doctor    say what works on this machine
  bench     measure the data plane beside this machine's limits
  version   print the version

Without flags, "draftscope run" uses a small model that is part of the program.
"draftscope COMMAND --help" explains a command and shows examples.

Exit status: 0 ok, 1 failed, 2 bad flags or input, 3 something is missing on
this machine, 4 finished, but not everything could be scored, 130 or 143 stopped
by an interrupt or SIGTERM with nothing to keep.
`

// command is one subcommand; it owns its flags.
type command func(ctx context.Context, args []string, out streams) error

type streams struct {
	stdout, stderr io.Writer
}

// exitError gives an error an exit code.
type exitError struct {
	code int
	err  error
}

func (e exitError) Error() string { return e.err.Error() }
func (e exitError) Unwrap() error { return e.err }

func badInput(err error) error          { return withCode(exitUsage, err) }
func badUsage(f string, a ...any) error { return badInput(fmt.Errorf(f, a...)) }

// withCode sets the exit code unless err already has one.
func withCode(code int, err error) error {
	var known exitError
	if err == nil || errors.As(err, &known) {
		return err
	}
	return exitError{code, err}
}

// partial says that a command did what it could, and says what is missing.
func partial(err error) bool {
	coded, ok := errors.AsType[exitError](err)
	return ok && coded.code == exitPartial
}

// run is the program: it never exits and never touches globals, so that tests
// can call it.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	commands := map[string]command{
		"run": cmdRun, "capture": cmdCapture, "tap": cmdTap, "import": cmdImport, "export": cmdExport, "replay": cmdReplay, "serve": cmdServe, "draft": cmdDraft, "store": cmdStore, "report": cmdReport, "diagnose": cmdDiagnose, "validate": cmdValidate, "compare": cmdCompare,
		"query": cmdQuery, "inspect": cmdInspect, "compact": cmdCompact, "delete": cmdDelete, "demo": cmdDemo, "doctor": cmdDoctor, "bench": cmdBench, "version": cmdVersion,
	}
	if len(args) == 0 {
		fmt.Fprint(stderr, usage)
		return exitUsage
	}
	switch args[0] {
	case "help", "-h", "-help", "--help":
		if len(args) > 1 && commands[args[1]] != nil {
			args = []string{args[1], "--help"}
			break
		}
		fmt.Fprint(stdout, usage)
		return exitOK
	case "--version", "-version":
		args = []string{"version"}
	}
	cmd, ok := commands[args[0]]
	if !ok {
		fmt.Fprintf(stderr, "draftscope: there is no command %q; \"draftscope help\" lists them\n", args[0])
		return exitUsage
	}
	err := placed(runStoppable(ctx, args[0], func(ctx context.Context) error { return cmd(ctx, args[1:], streams{stdout, stderr}) }))
	if err == nil || errors.Is(err, flag.ErrHelp) {
		return exitOK
	}
	fmt.Fprintf(stderr, "draftscope: %s\n", oneLine(err.Error()))
	if coded, ok := errors.AsType[exitError](err); ok {
		return coded.code
	}
	return exitFailed
}

// runStoppable ends the commands of which a part is worth nothing at an
// interrupt. The others finish what they have begun, and say so.
func runStoppable(ctx context.Context, name string, cmd func(context.Context) error) error {
	switch name {
	case "diagnose", "validate", "compare", "report", "query", "inspect", "export", "doctor":
		ctx, stop := stoppable(ctx)
		defer stop()
		return stopped(ctx, cmd(ctx))
	}
	return cmd(ctx)
}

// placed gives an error of where a command writes its exit code, the same for
// every command: 3 where the machine lacks space, rights or files that may be
// open; 2 where a path names no place.
func placed(err error) error {
	for _, missing := range []error{
		syscall.ENOSPC, syscall.EDQUOT, syscall.EROFS, syscall.EFBIG, syscall.EMFILE, syscall.ENFILE, os.ErrPermission,
	} {
		if errors.Is(err, missing) {
			return withCode(exitMissing, err)
		}
	}
	for _, bad := range []error{syscall.ENOTDIR, syscall.EISDIR, syscall.ENAMETOOLONG, syscall.ELOOP, os.ErrNotExist} {
		if errors.Is(err, bad) {
			return withCode(exitUsage, err)
		}
	}
	return err
}

func oneLine(s string) string {
	return strings.Join(strings.FieldsFunc(s, func(r rune) bool { return r == '\n' || r == '\r' }), "; ")
}

// newFlags starts a command's flags; help is its man page.
func newFlags(name, help string, out streams) *flag.FlagSet {
	fs := flag.NewFlagSet(name, flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.Usage = func() {
		fmt.Fprint(out.stdout, help)
		fmt.Fprintln(out.stdout, "\nflags:")
		fs.VisitAll(func(f *flag.Flag) {
			kind, text := flag.UnquoteUsage(f)
			line := "  --" + f.Name
			if kind != "" {
				line += " " + kind
			}
			if f.DefValue != "" && f.DefValue != "false" && f.DefValue != "0" && f.DefValue != "[]" {
				text += " (default " + f.DefValue + ")"
			}
			fmt.Fprintf(out.stdout, "%s\n        %s\n", line, text)
		})
	}
	return fs
}

// parse takes flags before, between and after the positional arguments.
func parse(fs *flag.FlagSet, args []string) (positional []string, err error) {
	for {
		// The flag package would show the whole help for every mistake.
		help := fs.Usage
		fs.Usage = func() {}
		err := fs.Parse(args)
		fs.Usage = help
		if err != nil {
			if errors.Is(err, flag.ErrHelp) {
				help()
				return nil, err
			}
			return nil, badUsage("%s: %w; \"draftscope %s --help\" shows the flags", fs.Name(), err, fs.Name())
		}
		args = fs.Args()
		if len(args) == 0 {
			return positional, nil
		}
		positional, args = append(positional, args[0]), args[1:]
	}
}

// parseNone is parse for a command without positional arguments.
func parseNone(fs *flag.FlagSet, args []string) error {
	rest, err := parse(fs, args)
	if err == nil && len(rest) > 0 {
		return badUsage("%s takes no argument %q; \"draftscope %s --help\" shows the flags", fs.Name(), rest[0], fs.Name())
	}
	return err
}
