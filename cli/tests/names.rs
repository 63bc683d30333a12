//! A model whose ops are called as training calls its own, through every verb.

#![allow(clippy::unwrap_used)]

mod support;

use support::Place;

const MODEL: &str = r#"graph "hostile" {
  layers "grad", "boundary", "head"
  %tok = input {kind: tokens} : i32[B,8] @ tokens F microbatch layer 0
  %emb = state {decay: true, init: {normal: {std: 0.02}}} : f32[256,16] @ cast.w Update step_begin layer 0
  %x = embedding %emb, %tok : f32[B,8,16] @ boundary_x F microbatch layer 0
  %wq = state {decay: true, init: {normal: {std: 0.02}}} : f32[16,2,8] @ w Update step_begin layer 1
  %wo = state {decay: true, init: {normal: {std: 0.02}}} : f32[2,8,16] @ prepare.w Update step_begin layer 1
  %q = dot_general {einsum: "bsh,hnd->bsnd"} %x, %wq : f32[B,8,2,8] @ boundary.boundary.0 F microbatch layer 1
  %o, %l = attention {dropout: 0.1, scale: 0.35} %q, %q, %q : f32[B,8,2,8], f32[B,8,2] @ y F microbatch layer 1
  %p, %m = attention {dropout: 0.1, scale: 0.35} %o, %q, %o : f32[B,8,2,8], f32[B,8,2] @ recompute.y F microbatch layer 1
  %z = dot_general {einsum: "bsnd,ndh->bsh"} %p, %wo : f32[B,8,16] @ grad.y.qkv F microbatch layer 1
  %r = binary {f: add} %z, %x : f32[B,8,16] @ grad.boundary.head.0.sum1 F microbatch layer 1
  %u = state {decay: true, init: {normal: {std: 0.02}}} : f32[16,256] @ moment1.w Update step_begin layer 2
  %labels = input {kind: labels} : i32[B,8] @ labels F microbatch layer 2
  %logits = dot_general {einsum: "bsh,hv->bsv"} %r, %u : f32[B,8,256] @ grad.seed F microbatch layer 2
  %lse = log_sum_exp %logits : f32[B,8] @ loss_scale F microbatch layer 2
  %nll = cross_entropy %logits, %lse, %labels : f32[B,8] @ loss F microbatch layer 2
  %sum = reduce {dims: [0, 1], kind: sum} %nll : f32[] @ accumulate.loss F microbatch layer 2
  return %sum
}
"#;

/// The model with the names that an author would rather give it.
fn usual() -> String {
    let names = [
        ("boundary_x", "embed.out"),
        ("boundary.boundary.0", "attn.q"),
        ("cast.w", "embed.weight"),
        ("prepare.w", "attn.out.weight"),
        ("moment1.w", "head.weight"),
        ("grad.y.qkv", "attn.out"),
        ("grad.boundary.head.0.sum1", "attn.residual"),
        ("grad.seed", "head.logits"),
        ("loss_scale", "head.lse"),
        ("accumulate.loss", "head.sum"),
        ("loss", "head.nll"),
    ];
    let rename = |line: &str| match line.split_once(" @ ") {
        Some((op, place)) => {
            let (path, rest) = place.split_once(' ').unwrap();
            let known = names.iter().find(|n| n.0 == path);
            format!("{op} @ {} {rest}", known.map_or(path, |n| n.1))
        }
        None => line.to_string(),
    };
    MODEL.lines().map(rename).collect::<Vec<_>>().join("\n")
}

/// The step that the plan of a model predicts, in a layout with twins, boundaries and copies.
fn planned(place: &Place, model: &str, precision: &str, pins: &[&str]) -> serde_json::Value {
    place.write("model.mw", model.as_bytes());
    let mut args = vec!["compile", "model.mw", "--cluster", "cpu-default"];
    args.extend(["--global-batch", "4", "--precision", precision]);
    pins.iter().for_each(|p| args.extend(["--pin", *p]));
    place.run(&args).expect(0);
    let plan: serde_json::Value = serde_json::from_slice(&place.read("plan.json")).unwrap();
    plan["predicted"].clone()
}

#[test]
fn a_model_may_call_its_ops_as_training_does() {
    let place = Place::new();
    for (precision, pins) in [
        ("f32", vec!["pipeline=2", "data=2", "recompute=full"]),
        ("f16", vec!["data=2", "tensor=2", "zero=3"]),
    ] {
        let expected = planned(&place, &usual(), precision, &pins);
        assert_eq!(planned(&place, MODEL, precision, &pins), expected);
        place.run(&["check", "plan.json"]).expect(0);
        for verb in ["inspect", "simulate"] {
            place.run(&[verb, "plan.json"]).expect(0);
        }
        let run = ["run", "plan.json", "--data", "text.txt", "--steps", "2"];
        place.run(&run).expect(0);
        place.run(&["compare", "plan.json", "run.json"]).expect(0);
    }
}
