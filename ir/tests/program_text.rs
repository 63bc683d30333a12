//! The text form of programs: what it says is read, what is wrong has its place, and no text
//! takes more than its share of time and memory. That programs of plans survive it is asserted
//! wherever the end-to-end tests prove one (`tests::assert_checked`).

use ir::program::{Event, InstrKind, Program, Stream, Which};
use ir::text::ParseError;
use ir::text::program::{parse, print, print_rank};
use ir::{AxisId, Contract, DType, InstrId, Order, Rank, StreamId, Sum, TemplateId};

const GOOD: &str = r#"program {
  microbatches 2 of 4 samples
  mesh stage0 rank0: data 2, tensor 2
  mesh stage1 rank4: data 2
  mesh stage2 rank6
  transfer x0 h.0.out f32[4,8] stage0 [data, _] to stage1 [data, _]
  role stage0 {
    arena 4096 bytes
    streams kernels, collectives over data, collectives over data+tensor, world, transfers
    buffers {
      buf0 tokens i32[4,8] [data, _] transient @0 64 bytes
      repeat 4 {
        buf{1+1} h.{0+1}.up f32[6,16] [_, tensor/2] persistent @{256+256} 192 bytes
      }
      buf5 "a {1+2} \"name\"" f32[6] [_] partial(data: sum, tensor: max) step @1280 24 bytes
      buf6 h.0.out f32[4,8] [data, _] microbatch*2 @1536 64 bytes
    }
    template begin0 {
      i0 fill -0.5 -> buf5 [kernels Update]
    }
    template F1 chunk 1 {
      i0 load tokens -> buf0 [kernels F after all collectives over data, i0 of begin0, i0 of x2:m-2]
      repeat 3 {
        i{1+1} dot_general {einsum: "ab,bc->ac"} buf0, buf{1+1} -> buf6 @ h.{0+1}.fc [kernels F layer{0+1} after i{0+1}]
      }
      i4 all_gather over data: buf1 -> buf2 (dim 0), buf3 -> buf4 (dim 1) [collectives over data F layer0]
      i5 all_reduce sum of bf16 in f32 library over data+tensor: buf5 -> buf5, buf6 -> buf6 [collectives over data+tensor F]
      i6 local_slice over data: buf1 -> buf2 (dim 0 unit 4) [kernels F]
      i7 all_to_all over data: buf1 -> buf2 (dim 0 to 1 unit 2) [collectives over data F]
    }
    template x2 {
      i0 exchange send x0 buf6 [transfers F after i5 of F1:m, i0 of x2]
    }
    template end3 {
      i0 world_sum #0 buf5, #3 buf1 -> buf2 [world Update]
      i1 world_sum -> buf2 [world Update]
      i2 copy buf1 -> buf2 [kernels Update after i0, i1, all kernels]
    }
    trace {
      begin0
      repeat 2 {
        F1:{0+1} x2:{0+1}
      }
      end3
    }
    state h.0.up parameter of h.0.up in buf1
    state loss_scale scalar of "" in buf5
    grad_norm buf5
  }
  role stage1 {
    arena 512 bytes
    streams transfers
    buffers {
      buf0 h.0.out f32[4,8] [data, _] microbatch*1 @0 64 bytes
    }
    template x0 {
      i0 exchange receive x0 buf0 [transfers F]
    }
    trace {
      x0:0 x0:1
    }
    loss buf0
  }
  role stage2 {
    arena 0 bytes
    buffers {
    }
    trace {
    }
  }
}
"#;

fn good() -> Program {
    parse(GOOD).expect("the text is a program")
}

#[test]
fn all_there_is_survives() {
    let program = good();
    let text = print(&program);
    assert_eq!(parse(&text).as_ref(), Ok(&program), "{text}");
    assert_eq!(print(&parse(&text).expect("it was parsed")), text);
}

#[test]
fn repeats_are_written_out() {
    let program = good();
    let role = &program.roles[0];
    let names: Vec<&str> = role.buffers.iter().map(|b| b.name.as_str()).collect();
    let up = ["h.0.up", "h.1.up", "h.2.up", "h.3.up"];
    assert_eq!(
        names,
        [&["tokens"], &up[..], &["a {1+2} \"name\"", "h.0.out"]].concat()
    );
    assert_eq!(role.buffers[3].offset, 768);
    let third = &role.templates[1].instructions[3];
    assert_eq!(third.layer.map(|l| l.0), Some(2));
    assert_eq!(third.deps, [InstrId(2)]);
    let InstrKind::Compute { path, inputs, .. } = &third.kind else {
        panic!("{third:?}")
    };
    assert_eq!((path.as_str(), inputs[0].0, inputs[1].0), ("h.2.fc", 0, 3));
    assert_eq!(
        role.trace
            .iter()
            .filter_map(|s| s.microbatch)
            .collect::<Vec<_>>(),
        [0, 0, 1, 1]
    );
}

#[test]
fn waits_name_streams_and_instructions_of_other_slots() {
    let role = &good().roles[0];
    let done = |template, instruction, which| Event::Done {
        template: TemplateId(template),
        instruction: InstrId(instruction),
        which,
    };
    let [load, send, copy] =
        [(1, 0), (2, 0), (3, 2)].map(|(t, i): (usize, usize)| &role.templates[t].instructions[i]);
    let data = Event::Drained(StreamId(1));
    let waits = [data, done(0, 0, Which::Latest), done(2, 0, Which::Back(2))];
    assert_eq!((&load.events[..], &load.deps[..]), (&waits[..], &[][..]));
    let waits = [done(1, 5, Which::Back(0)), done(2, 0, Which::Latest)];
    assert_eq!((send.stream, &send.events[..]), (StreamId(4), &waits[..]));
    assert_eq!(copy.deps, [InstrId(0), InstrId(1)]);
    assert_eq!(copy.events, [Event::Drained(StreamId(0))]);
    let group = role.templates[1].instructions[5].stream;
    assert_eq!(
        role.stream(group),
        &Stream::Communicator {
            axes: vec![AxisId(0), AxisId(1)]
        }
    );
}

#[test]
fn a_contract_says_what_buffers_do_not() {
    let contract = |sum: &str| {
        let text = GOOD.replacen("sum of bf16 in f32 library", sum, 1);
        let program = parse(&text).expect("a program");
        assert_eq!(parse(&print(&program)).as_ref(), Ok(&program), "{sum}");
        assert!(
            print(&program).contains(&format!("all_reduce {sum} over")),
            "{sum}"
        );
        match program.roles[0].templates[1].instructions[5].kind {
            InstrKind::Collective { contract, .. } => contract,
            _ => panic!("{sum}"),
        }
    };
    let stated = |operand, sum: Option<(DType, Order)>| {
        let sum = sum.map(|(dtype, order)| Sum { dtype, order });
        Contract { operand, sum }
    };
    let (f32, bf16) = (DType::F32, DType::Bf16);
    for (sum, expected) in [
        (
            "sum of bf16 in f32 library",
            stated(bf16, Some((f32, Order::Library))),
        ),
        ("sum in f32 fixed", stated(f32, Some((f32, Order::Fixed)))),
        ("sum in bf16 fixed", stated(f32, Some((bf16, Order::Fixed)))),
        ("sum", stated(f32, None)),
        ("max of i32", stated(DType::I32, None)),
    ] {
        assert_eq!(contract(sum), expected, "{sum}");
    }
}

/// Equal layers are written once: a program of ten times as many has hardly more lines.
#[test]
fn equal_layers_are_folded() {
    let lines = |n: usize| {
        let text = GOOD.replace("repeat 4 {", &format!("repeat {n} {{"));
        // The buffers after it have other numbers then.
        let text = text.replace("buf5 \"a", &format!("buf{} \"a", n + 1));
        let text = text.replace("buf6 h.0", &format!("buf{} h.0", n + 2));
        print(&parse(&text).expect("a program of many layers"))
            .lines()
            .count()
    };
    assert_eq!(lines(40), lines(4));
}

#[test]
fn a_rank_sees_its_part() {
    let program = good();
    let text = print_rank(&program, Rank(3)).expect("the rank exists");
    for words in [
        "rank3 of stage0: data 1 of 2, tensor 1 of 2 {",
        "local i32[2,8] holds [2..4, 0..8]",
        "local f32[6,8] holds [0..6, 8..16]",
        "all_gather over data (rank1, rank3): buf1",
        "exchange send x0 buf6 (to rank5)",
    ] {
        assert!(text.contains(words), "`{words}` is not in:\n{text}");
    }
    let other = print_rank(&program, Rank(2)).expect("the rank exists");
    assert!(other.contains("send x0 buf6 (nothing)"), "{other}");
    let text = print_rank(&program, Rank(5)).expect("the rank exists");
    assert!(text.contains("receive x0 buf0 (from rank3)"), "{text}");
    assert!(!text.contains("role stage0"), "{text}");
    assert_eq!(print_rank(&program, Rank(7)), None);
}

fn refused(text: &str) -> ParseError {
    parse(text).expect_err("the text is no program")
}

/// A `^` stands before what is wrong; without one it is the line, as in repeats.
#[test]
fn errors_name_place_and_reason() {
    let cases = [
        ("ches 2", "ches ^x", "expected the number of microbatches"),
        (
            "4 samples",
            "4 samples route ^w",
            "this is no route; ring and v are",
        ),
        (
            "stage1 rank4: data 2",
            "^stage1 rank4: data 0",
            "the mesh has no ranks",
        ),
        (
            "stage0 rank0: data 2, tensor 2",
            "^stage0 rank0: data 2, data 2",
            "axes need different",
        ),
        (
            "[data, _] to",
            "[^date, _] to",
            "`date` is not an axis of the mesh",
        ),
        ("to stage1", "to ^stage3", "stage3 has no mesh"),
        (
            "streams kernels",
            "streams ^queues",
            "`queues` is not a stream",
        ),
        (
            "buf0 tokens",
            "^buf1 tokens",
            "expected `buf0`, found `buf1`",
        ),
        (
            "i32[4,8] [data, _]",
            "i32[4,8] ^[data]",
            "1 dims of a tensor of 2",
        ),
        (
            "i32[4,8] [data, _]",
            "i32[4,8] ^[data, data]",
            "axis `data` is used twice",
        ),
        (
            "transient @0",
            "^short @0",
            "`short` is not the class of a buffer",
        ),
        ("tokens i32", "tokens ^i31", "`i31` is not an element type"),
        (
            "-0.5 -> buf5",
            "-0.5 -> ^buf7",
            "expected a buffer of the role, `buf` and a number below 7",
        ),
        ("i1 world_sum", "^i7 world_sum", "expected `i1`, found `i7`"),
        (
            "buf2 [world",
            "buf2 [^collectives over tensor",
            "the role has no stream of collectives over",
        ),
        (
            "[kernels Update after",
            "[kernels ^after",
            "`after` is not the pass",
        ),
        (
            "after i0, i1",
            "after i0, ^i2",
            "i2 does not come before i2",
        ),
        ("all kernels]", "all ^i1]", "`i1` is not a stream"),
        (
            "i5 of F1:m",
            "^i5 of B1:m",
            "the role has no such template with an i5",
        ),
        (
            "i5 of F1:m",
            "^i8 of F1:m",
            "the role has no such template with an i8",
        ),
        ("i5 of F1:m", "i5 of F1:^1", "expected `m`"),
        (
            "i0 of x2:m-2",
            "i0 of x2:m-^m",
            "expected how many microbatches before",
        ),
        ("(dim 0), buf3", "^, buf3", "expected `(`"),
        ("(dim 0), buf3", "(^over 0), buf3", "expected `dim`"),
        (
            "local_slice over data: buf1 -> buf2 (",
            "local_slice over data+tensor: buf1 -> buf2 ^(",
            "`local_slice` goes over one axis, not 2",
        ),
        (
            "data+tensor: buf5",
            "data+^: buf5",
            "expected an axis of the mesh",
        ),
        (
            "in f32 library",
            "in ^f31 library",
            "`f31` is not an element type",
        ),
        ("in f32 library", "in f32 ^any", "`any` is not the order"),
        ("send x0 buf6", "send ^x1 buf6", "expected a transfer"),
        ("begin0\n", "^begin1\n", "the role has no such template"),
        ("in buf5", "^to buf5", "expected `in`"),
        (
            "template end3",
            "template ^end4",
            "the next template has number 3",
        ),
        ("repeat 2", "repeat ^x", "expected the number of copies"),
        ("repeat 2 {", "repeat 2 ^with {", "expected `{`"),
        (
            "i{1+1}",
            "i^{1*1}",
            "expected a number that grows, as in `{3+2}`",
        ),
        (
            "i{1+1}",
            "i{1+2}",
            "expected `i2`, found `i3` in copy 1 of the repeat",
        ),
        ("i{0+1}", "i{0-1}", "copy 1: 0-1 for each copy is no number"),
    ];
    for (old, new, said) in cases {
        let marked = GOOD.replacen(old, new, 1);
        assert_ne!(marked, GOOD, "{old}");
        let place = marked.find('^').unwrap_or_else(|| {
            let line = marked[..marked.find(new).expect("it was put there")].rfind('\n');
            let line = line.map_or(0, |end| end + 1);
            line + marked[line..].find(|c| c != ' ').expect("a line")
        });
        let text = marked.replacen('^', "", 1);
        let error = refused(&text);
        let line = 1 + text[..place].matches('\n').count();
        let found = (error.line, error.start, error.message.starts_with(said));
        assert_eq!(
            found,
            (line, place, true),
            "{new}: {error}, expected {said}"
        );
        assert!(text.is_char_boundary(error.start) && error.start + error.len <= text.len());
    }
    let cut = refused(&GOOD[..GOOD.len() - 3]);
    assert!(cut.message.contains("the end of the text"), "{cut}");
}

/// The program that a text stands for is bounded, however few its bytes are.
#[test]
fn no_text_takes_more_than_its_share() {
    let many = GOOD.replace("repeat 4 {", "repeat 1000000000000 {");
    let error = refused(&many);
    assert!(error.message.contains("stands for more than"), "{error}");
    let many = GOOD.replace("repeat 2 {", "repeat 18446744073709551615 {");
    assert!(refused(&many).message.contains("stands for more than"));
    let empty = GOOD.replace(
        "    trace {",
        "    trace {\nrepeat 18446744073709551615 {\n}\n",
    );
    assert_eq!(parse(&empty), Ok(good()));
    let nested = GOOD.replace("        F1:{0+1} x2", "repeat 2 {\n        F1:{0+1} x2");
    assert!(refused(&nested).message.contains("inside a `repeat`"));
    // A hundred thousand lines that differ in words and in numbers are printed in seconds.
    let slots: String = (0..100_000u64)
        .map(|i| format!("F1:{} x2:{}\n", i * i % 977, i % 7))
        .collect();
    let text = GOOD.replace("      begin0\n", &format!("      begin0\n{slots}"));
    let program = parse(&text).expect("a long program");
    assert_eq!(parse(&print(&program)), Ok(program));
}
