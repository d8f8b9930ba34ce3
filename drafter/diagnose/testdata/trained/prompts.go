// Command prompts writes the prompts that train.py lets the target continue:
// doc comments with the function header that follows them, from Go source, in
// the target's chat template.
//
//	go run ./drafter/diagnose/testdata/trained MODEL OUT DIR...
//
// OUT is a list of little-endian uint16: for each prompt its length in
// tokens, then the tokens.
package main

import (
	"encoding/binary"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"log"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/draftscope/draftscope/extract/tokenizer"
)

// Prompts as the demo's own are: of some length, and of one header line.
const (
	shortest = 20
	longest  = 64
	most     = 24576
)

func main() {
	if len(os.Args) < 4 {
		log.Fatal("want MODEL OUT DIR...")
	}
	if err := run(os.Args[1], os.Args[2], os.Args[3:]); err != nil {
		log.Fatal(err)
	}
}

func run(model, out string, dirs []string) error {
	tok, err := tokenizer.Load(os.DirFS(model), ".")
	if err != nil {
		return fmt.Errorf("loading the tokenizer: %w", err)
	}
	seen := map[string]bool{}
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			return collect(path, seen)
		})
		if err != nil {
			return fmt.Errorf("reading %s: %w", dir, err)
		}
	}
	texts := make([]string, 0, len(seen))
	for text := range seen {
		texts = append(texts, text)
	}
	slices.Sort(texts)
	rng := rand.New(rand.NewPCG(1, 2))
	rng.Shuffle(len(texts), func(i, j int) { texts[i], texts[j] = texts[j], texts[i] })
	var data []byte
	n := 0
	for _, text := range texts {
		ids := tok.Encode(tokenizer.Prompt(text))
		if len(ids) < shortest || len(ids) > longest {
			continue
		}
		data = binary.LittleEndian.AppendUint16(data, uint16(len(ids)))
		for _, id := range ids {
			data = binary.LittleEndian.AppendUint16(data, uint16(id))
		}
		if n++; n == most {
			break
		}
	}
	log.Printf("%d prompts of %d", n, len(texts))
	return os.WriteFile(out, data, 0o644)
}

// collect adds the documented functions of a file.
func collect(path string, to map[string]bool) error {
	src, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, path, src, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil // generated fragments and templates
	}
	for _, decl := range file.Decls {
		f, ok := decl.(*ast.FuncDecl)
		if !ok || f.Body == nil || f.Doc == nil {
			continue
		}
		doc := strings.SplitN(f.Doc.List[0].Text, "\n", 2)[0]
		header := string(src[fset.Position(f.Pos()).Offset : fset.Position(f.Body.Lbrace).Offset+1])
		if strings.HasPrefix(doc, "// ") && !strings.Contains(header, "\n") {
			to[doc+"\n"+header] = true
		}
	}
	return nil
}
