//! Jobs are read as they are meant, what is wrong with them is told with its place, and damaged files
//! of every form get an answer.

#![allow(clippy::unwrap_used)] // A test may stop at what it does not expect.

use frameworks::{Framework, Recomputation};
use ir::Precision;
use jobs::{Given, JobError, Model, NoteKind, Reading, Recompute, Split, World, measured, read};
use proptest::prelude::*;

const SLURM: &str = include_str!("../../examples/jobs/llama-70b-megatron.sbatch");
const SCRIPT: &str = include_str!("../../examples/jobs/gpt-2.7b-megatron.sh");
const TITAN: &str = include_str!("../../examples/jobs/llama-8b-torchtitan.toml");
const DEEPSPEED: &str = include_str!("../../examples/jobs/zero3-deepspeed.json");

fn given(set: &[(&str, &str)]) -> Given {
    Given {
        variables: set
            .iter()
            .map(|(k, v)| (k.to_string(), v.to_string()))
            .collect(),
        ..Given::default()
    }
}

fn no_file(_: &str) -> Result<String, String> {
    Err("there is none".into())
}

fn job(file: &str, text: &str, set: &[(&str, &str)]) -> Result<Reading, JobError> {
    read(file, text, &given(set), &no_file)
}

fn names(reading: &Reading, kind: NoteKind) -> Vec<&str> {
    let own = reading.notes.iter().filter(|n| n.kind == kind);
    own.map(|n| n.name.as_str()).collect()
}

#[test]
fn a_slurm_script_of_megatron_is_read_whole() {
    let reading = job("job.sbatch", SLURM, &[]).unwrap();
    let j = &reading.job;
    assert_eq!(j.framework, Framework::MegatronCore);
    assert_eq!(
        j.world,
        World {
            hosts: Some(8),
            per_host: Some(8),
            devices: None
        }
    );
    assert_eq!(
        (j.tensor, j.pipeline, j.virtual_stages, j.data),
        (8, 4, 4, Some(2))
    );
    assert_eq!(
        (j.micro_batch, j.global_batch, j.sequence),
        (1, Some(512), Some(8192))
    );
    assert_eq!((j.zero, j.sequence_parallel), (1, true));
    assert_eq!(j.recompute, Recompute::All(Recomputation::Full));
    assert_eq!(
        (j.split.clone(), j.precision),
        (Split::Layers, Precision::Bf16)
    );
    assert_eq!(j.options, ["grads-bf16"]);
    let Model::Config(config) = &j.model else {
        panic!("{:?}", j.model);
    };
    assert_eq!(config["model_type"], "llama");
    assert_eq!(config["num_key_value_heads"], 8);
    assert_eq!(
        names(&reading, NoteKind::NotModelled),
        ["--grad-reduce-in-bf16", "--cross-entropy-loss-fusion"]
    );
    assert_eq!(names(&reading, NoteKind::Unknown), Vec::<&str>::new());
    assert!(names(&reading, NoteKind::NoEffect).contains(&"--data-path"));
}

#[test]
fn a_variable_that_nothing_sets_is_named_with_the_way_to_give_it() {
    let e = job("train.sh", SCRIPT, &[]).unwrap_err();
    assert!(
        e.problem
            .contains("the variable `NNODES`, which nothing sets"),
        "{e}"
    );
    assert_eq!(e.help, "give it as --set NNODES=VALUE");
    let reading = job(
        "train.sh",
        SCRIPT,
        &[("NNODES", "2"), ("GLOBAL_BATCH", "128")],
    )
    .unwrap();
    let j = &reading.job;
    assert_eq!((j.tensor, j.data, j.global_batch), (4, Some(4), Some(128)));
    assert_eq!(j.recompute, Recompute::All(Recomputation::Attention));
    let Model::Config(config) = &j.model else {
        panic!("{:?}", j.model);
    };
    assert_eq!(
        (&config["model_type"], &config["vocab_size"]),
        (&"gpt2".into(), &50_257.into())
    );
    // What changes nothing may have gaps: DATA_PATH.
    assert!(names(&reading, NoteKind::Assumed).contains(&"--vocab-size"));
    assert_eq!(j.options, ["no-tensor-overlap", "no-gradient-overlap"]);
    // Arguments in a variable that nothing sets could be any.
    let hidden = SCRIPT.replace("--recompute-activations", "--recompute-num-layers 1 $MORE");
    let e = job("train.sh", &hidden, &[("NNODES", "2")]).unwrap_err();
    assert!(e.help.contains("--set MORE="), "{e}");
}

#[test]
fn what_is_wrong_is_told_with_its_line() {
    let wrong = |from: &str, to: &str| {
        let text = SLURM.replace(from, to);
        assert_ne!(text, SLURM);
        job("job.sbatch", &text, &[]).unwrap_err()
    };
    let line = |part: &str| SLURM.lines().position(|l| l.contains(part)).map(|i| i + 1);
    let e = wrong("--num-layers 80", "--num-layers eighty");
    assert_eq!(e.line, line("--num-layers 80"));
    assert!(e.problem.contains("`--num-layers` is `eighty`"), "{e}");
    let e = wrong("TP=8", "TP=7");
    assert!(e.problem.contains("do not divide 64 devices"), "{e}");
    let e = wrong("GLOBAL_BATCH=512", "GLOBAL_BATCH=513");
    assert!(
        e.problem
            .contains("no multiple of 1 samples x 2 data ranks"),
        "{e}"
    );
    let e = wrong(
        "--num-layers-per-virtual-pipeline-stage 5",
        "--num-layers-per-virtual-pipeline-stage 7",
    );
    assert!(e.problem.contains("do not divide 80 layers"), "{e}");
    let e = wrong(
        "    \"${PARALLEL_ARGS[@]}\" \\\n",
        "    \"${PARALLEL_ARGS[@]}\"\n",
    );
    assert!(e.problem.contains("is a backslash missing"), "{e}");
    let e = wrong("--micro-batch-size $MICRO_BATCH", "");
    assert!(e.problem.contains("`--micro-batch-size` is missing"), "{e}");
    let e = job("notes.sh", "echo hello\n", &[]).unwrap_err();
    assert!(
        e.problem.contains("no command of it starts a training"),
        "{e}"
    );
}

#[test]
fn names_that_are_not_known_are_listed_with_their_lines() {
    let text = SLURM.replace("--swiglu", "--swiglu\n    --make-it-fast 3");
    let reading = job("job.sbatch", &text, &[]).unwrap();
    let note = reading
        .notes
        .iter()
        .find(|n| n.kind == NoteKind::Unknown)
        .unwrap();
    assert_eq!(
        (note.name.as_str(), note.value.as_deref()),
        ("--make-it-fast", Some("3"))
    );
    assert_eq!(
        note.line,
        text.lines()
            .position(|l| l.contains("--make-it"))
            .map(|i| i + 1)
    );
    let text = TITAN.replace("[compile]", "[compile]\nsped_up = true");
    let reading = job("t.toml", &text, &[]).unwrap();
    assert_eq!(names(&reading, NoteKind::Unknown), ["compile.sped_up"]);
    let text = DEEPSPEED.replace("\"stage\": 3", "\"stage\": 3, \"stage4\": true");
    let reading = job("d.json", &text, &[]).unwrap();
    assert_eq!(
        names(&reading, NoteKind::Unknown),
        ["zero_optimization.stage4"]
    );
}

#[test]
fn torchtitan_says_its_model_and_degrees() {
    let reading = job("llama.toml", TITAN, &[]).unwrap();
    let j = &reading.job;
    assert_eq!(j.framework, Framework::TorchTitan);
    assert_eq!(j.model, Model::BuiltIn("llama-3.1-8b".into()));
    assert_eq!((j.tensor, j.data, j.zero, j.micro_batch), (2, None, 3, 1));
    assert_eq!(
        (j.version.as_deref(), j.recompute.clone()),
        (None, Recompute::All(Recomputation::Full))
    );
    let eager = TITAN.replace("enable = true", "enable = false");
    assert_eq!(
        job("l.toml", &eager, &[]).unwrap().job.version.as_deref(),
        Some("2024-eager")
    );
    let replicate = "data_parallel_replicate_degree = 1";
    let hybrid = TITAN.replace(replicate, "data_parallel_replicate_degree = 4");
    let hybrid = job("l.toml", &hybrid, &[]).unwrap();
    assert_eq!((hybrid.job.copies, hybrid.job.zero), (4, 3));
    let unmodelled = names(&hybrid, NoteKind::NotModelled);
    assert!(
        unmodelled.iter().all(|n| !n.contains("replicate")),
        "{unmodelled:?}"
    );
    let other = TITAN.replace("flavor = \"8B\"", "flavor = \"9B\"");
    assert!(matches!(
        job("l.toml", &other, &[]).unwrap().job.model,
        Model::NotStated(_)
    ));
    let e = job("l.toml", "[training]\nseq_len = 'x'\n", &[]).unwrap_err();
    assert_eq!(e.line, Some(2));
    let e = job("l.toml", "[training\n", &[]).unwrap_err();
    assert_eq!(e.line, Some(1));
}

/// Instances are those of the distributed optimizer or of Megatron-FSDP, and divide the data ranks.
#[test]
fn instances_of_megatron_are_copies_of_states() {
    let with = |flags: &str| job("job.sbatch", &SLURM.replace("--swiglu", flags), &[]);
    let one = with("--swiglu --num-distributed-optimizer-instances 2").unwrap();
    assert_eq!(
        (one.job.copies, one.job.zero, one.job.data),
        (2, 1, Some(2))
    );
    let e = with("--swiglu --num-distributed-optimizer-instances 3").unwrap_err();
    assert!(
        e.problem.contains("3 instances do not divide 2 data ranks"),
        "{e}"
    );
    assert!(e.line.is_some());
    let fsdp = "--swiglu --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params \
                --num-distributed-optimizer-instances 4";
    let sharded = SLURM.replace("PP=4", "PP=1").replace("--swiglu", fsdp);
    let sharded = sharded.replace("    --num-layers-per-virtual-pipeline-stage 5\n", "");
    let reading = job("job.sbatch", &sharded, &[]).unwrap();
    assert_eq!((reading.job.copies, reading.job.zero), (4, 3));
    let unmodelled = names(&reading, NoteKind::NotModelled);
    assert!(
        unmodelled.iter().all(|n| !n.contains("instances")),
        "{unmodelled:?}"
    );
}

#[test]
fn deepspeed_says_its_stage_and_batch() {
    let reading = job("ds.json", DEEPSPEED, &[]).unwrap();
    let j = &reading.job;
    assert_eq!((j.framework, j.zero), (Framework::DeepSpeed, 3));
    assert_eq!(
        (j.micro_batch, j.accumulation, j.global_batch),
        (1, Some(8), None)
    );
    assert!(names(&reading, NoteKind::Assumed).contains(&"gradient checkpointing"));
    let set = [("gradient_checkpointing", "true")];
    let checkpointed = job("ds.json", DEEPSPEED, &set).unwrap().job;
    assert_eq!(checkpointed.recompute, Recompute::All(Recomputation::Full));
    let auto = DEEPSPEED.replace("_per_gpu\": 1", "_per_gpu\": \"auto\"");
    let e = job("ds.json", &auto, &[]).unwrap_err();
    assert!(
        e.help.contains("--set train_micro_batch_size_per_gpu=N"),
        "{e}"
    );
    let set = [("train_micro_batch_size_per_gpu", "4")];
    assert_eq!(job("ds.json", &auto, &set).unwrap().job.micro_batch, 4);
    let auto = DEEPSPEED.replace("\"enabled\": true", "\"enabled\": \"auto\"");
    let e = job("ds.json", &auto, &[]).unwrap_err();
    assert!(e.help.contains("--set bf16=true"), "{e}");
    let given = job("ds.json", &auto, &[("bf16", "true")]).unwrap();
    assert_eq!(given.job.precision, Precision::Bf16);
    let wrong = DEEPSPEED.replace("\"stage\": 3", "\"stage\": 4");
    assert!(
        job("ds.json", &wrong, &[])
            .unwrap_err()
            .problem
            .contains("expected 0 to 3")
    );
    assert!(
        job("x.json", "{\"a\": 1}", &[])
            .unwrap_err()
            .problem
            .contains("no configuration of DeepSpeed")
    );
    assert_eq!(job("x.json", "{\n\"a\": ]", &[]).unwrap_err().line, Some(2));
}

#[test]
fn a_script_leads_to_the_files_that_it_names() {
    let open = |path: &str| match path {
        "conf/titan.toml" => Ok(TITAN.to_string()),
        "ds.json" => Ok(DEEPSPEED.replace("_per_gpu\": 1", "_per_gpu\": \"auto\"")),
        _ => Err("there is none".to_string()),
    };
    let of = |text: &str| read("run.sh", text, &Given::default(), &open);
    let titan = "NGPU=8\ntorchrun --nproc_per_node=$NGPU --nnodes 2 -m torchtitan.train --job.config_file conf/titan.toml --training.local_batch_size 4\n";
    let reading = of(titan).unwrap();
    assert_eq!(reading.job.micro_batch, 4);
    assert_eq!(
        (reading.job.data, reading.job.world.hosts),
        (Some(8), Some(2))
    );
    assert_eq!(reading.files, ["run.sh", "conf/titan.toml"]);
    let trainer = "deepspeed --num_gpus 8 train.py --deepspeed ds.json --per_device_train_batch_size 2 --gradient_checkpointing True --model_max_length 2048\n";
    let job = of(trainer).unwrap().job;
    assert_eq!(
        (job.micro_batch, job.sequence, job.data),
        (2, Some(2048), Some(8))
    );
    assert_eq!(job.recompute, Recompute::All(Recomputation::Full));
    let e = of("torchrun train.py --deepspeed gone.json\n").unwrap_err();
    assert!(e.problem.contains("gone.json, which cannot be read"), "{e}");
    let both = format!("{titan}{trainer}");
    assert!(
        of(&both)
            .unwrap_err()
            .problem
            .contains("two commands start a training")
    );
    let quoted = "srun bash -c \"torchrun --nnodes 1 --nproc-per-node 8 -m torchtitan.train --job.config_file conf/titan.toml\"\n";
    assert_eq!(of(quoted).unwrap().job.data, Some(4));
}

/// A log as Megatron-LM prints it.
fn log() -> String {
    let arguments = [
        ("add_bias_linear", "False"),
        ("add_qkv_bias", "False"),
        ("bf16", "True"),
        ("context_parallel_size", "1"),
        ("ffn_hidden_size", "14336"),
        ("fp8", "None"),
        ("global_batch_size", "128"),
        ("group_query_attention", "True"),
        ("hidden_dropout", "0.0"),
        ("attention_dropout", "0.0"),
        ("hidden_size", "4096"),
        ("kv_channels", "128"),
        ("make_vocab_size_divisible_by", "128"),
        ("micro_batch_size", "2"),
        ("moe_router_topk", "2"),
        ("normalization", "RMSNorm"),
        ("num_attention_heads", "32"),
        ("num_experts", "None"),
        ("num_layers", "32"),
        ("num_query_groups", "8"),
        ("optimizer_cpu_offload", "False"),
        ("pipeline_model_parallel_size", "1"),
        ("position_embedding_type", "rope"),
        ("recompute_granularity", "None"),
        ("recompute_modules", "['core_attn']"),
        ("seq_length", "8192"),
        ("sequence_parallel", "True"),
        ("swiglu", "True"),
        ("tensor_model_parallel_size", "2"),
        ("tp_comm_overlap", "True"),
        ("untie_embeddings_and_output_weights", "True"),
        ("use_distributed_optimizer", "True"),
        ("overlap_grad_reduce", "True"),
        ("vocab_size", "128256"),
        ("world_size", "16"),
        // What models of other kinds would say.
        ("hybrid_attention_ratio", "0.0"),
        ("a_new_thing", "7"),
    ];
    let mut text = "------------------------ arguments ------------------------\n".to_string();
    for (name, value) in arguments {
        text += &format!("  {name} {} {value}\n", ".".repeat(48 - name.len()));
    }
    text += "-------------------- end of arguments ---------------------\n";
    for i in 1..=5 {
        let ms = if i == 1 {
            60_000.0
        } else {
            7300.0 + f64::from(i)
        };
        text += &format!(
            " iteration {i:8}/ 100 | consumed samples: {:12} | elapsed time per iteration (ms): {ms:.1} | global batch size:   128 | lm loss: 1.0E+01 |\n",
            i * 128
        );
    }
    text
}

#[test]
fn a_log_has_arguments_and_iterations() {
    let reading = job("out.log", &log(), &[]).unwrap();
    let j = &reading.job;
    assert_eq!(
        (j.tensor, j.data, j.zero, j.world.devices()),
        (2, Some(8), 1, Some(16))
    );
    assert_eq!(j.recompute, Recompute::All(Recomputation::None));
    assert!(matches!(&j.model, Model::Config(c) if c["model_type"] == "llama"));
    assert_eq!(names(&reading, NoteKind::Unknown), ["--a-new-thing"]);
    let measured = reading.measured.unwrap();
    assert_eq!((measured.step_s, measured.steps), (Some(7.3035), 4));
}

/// A Megatron job with lines of its own before the command, which takes `$MORE`.
fn with(lines: &str) -> String {
    let sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 1000 \
         --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 16";
    format!(
        "#SBATCH --nodes=1 --gres=gpu:8,nvme:1\nMORE='--bf16'\n{lines}\n\
         srun python pretrain_gpt.py {sizes} $MORE\n"
    )
}

#[test]
fn what_stands_under_a_condition_is_not_known() {
    let lines = [
        "if [ -n \"$A\" ]; then MORE+=' --tensor-model-parallel-size 8'; fi\nMORE+=' --fp16'",
        "case $SIZE in\n70B) MORE='--tensor-model-parallel-size 8' ;;\n*) MORE='' ;;\nesac",
        "(( N > 1 )) && MORE='--tensor-model-parallel-size 8'",
        "grep -q big size.txt && MORE='--tensor-model-parallel-size 8'",
    ];
    for lines in lines {
        let found = job("job.sbatch", &with(lines), &[]);
        let said = match &found {
            Ok(reading) => reading.notes.iter().map(|n| n.words.clone()).collect(),
            Err(e) => e.to_string(),
        };
        let tensor = found.as_ref().ok().map(|r| r.job.tensor);
        assert!(
            said.contains("only the shell can decide"),
            "{lines}: {tensor:?} {said}"
        );
    }
    // What is given counts, and so does what always follows.
    let given = job("job.sbatch", &with(lines[1]), &[("MORE", "--bf16")]).unwrap();
    assert_eq!(given.job.precision, Precision::Bf16);
    let certain = with("cd /tmp && MORE='--tensor-model-parallel-size 8'");
    assert_eq!(job("job.sbatch", &certain, &[]).unwrap().job.tensor, 8);
}

#[test]
fn slurm_may_give_more_than_gpus() {
    let reading = job("job.sbatch", &with(""), &[]).unwrap();
    assert_eq!(reading.job.world.per_host, Some(8));
}

#[test]
fn what_logs_write_of_plain_models_makes_no_other() {
    let dense = log().replace("num_experts ..................................... None", "");
    let one = "  num_experts ..................................... [1]\n  zero_stage ...................................... 1.0\n";
    let text = dense.replacen("  a_new_thing", &format!("{one}  a_new_thing"), 1);
    let reading = job("out.log", &text, &[]).unwrap();
    assert_eq!((reading.job.expert, reading.job.zero), (1, 1));
    assert!(matches!(&reading.job.model, Model::Config(c) if c["model_type"] == "llama"));
    let wrong = text.replace(" 1.0\n", " 7.0\n");
    let said = job("out.log", &wrong, &[]).unwrap_err().to_string();
    assert!(said.contains("there is no ZeRO stage 7"), "{said}");
}

/// Every form of file, by a name of its own.
fn forms() -> Vec<(&'static str, String)> {
    vec![
        ("job.sbatch", SLURM.into()),
        ("train.sh", SCRIPT.replace("${NNODES}", "2")),
        ("llama.toml", TITAN.into()),
        ("ds.json", DEEPSPEED.into()),
        ("out.log", log()),
    ]
}

/// Pieces that mean something to one of the readers.
const PIECES: [&str; 26] = [
    "\\\n",
    "\n",
    "\"",
    "'",
    "$(",
    ")",
    "${",
    "}",
    "$((",
    "((",
    "`",
    "<<EOF\n",
    "&&",
    "||",
    " # ",
    "[@]",
    "=(",
    "--num-layers 99999999999999999999",
    "-1",
    "0",
    "1e999",
    "\u{e0f0}",
    "\u{e0f1}x",
    "é",
    "$",
    "--",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// Whatever is cut out of a file or put into it, there is an answer, and its line is one that is
    /// there.
    #[test]
    fn damaged_files_get_an_answer(
        form in 0usize..5,
        damage in prop::collection::vec((any::<prop::sample::Index>(), 0usize..40, 0usize..PIECES.len() + 1), 1..4),
    ) {
        let (file, text) = forms().swap_remove(form);
        let mut chars: Vec<char> = text.chars().collect();
        for (at, cut, piece) in damage {
            let start = at.index(chars.len().max(1)).min(chars.len());
            let end = (start + cut).min(chars.len());
            let new = PIECES.get(piece).copied().unwrap_or_default();
            chars.splice(start..end, new.chars());
        }
        let text: String = chars.into_iter().collect();
        match job(file, &text, &[]) {
            Ok(reading) => prop_assert!(reading.job.micro_batch > 0),
            Err(e) => {
                let lines = text.lines().count() + 1;
                prop_assert!(e.line.is_none_or(|l| (1..=lines).contains(&l)), "{e}");
                prop_assert!(!e.help.is_empty());
            }
        }
        measured::of_log(&text);
        measured::of_trace(&text).ok();
    }

    /// Words of any kind are no reason to stop.
    #[test]
    fn scripts_of_any_words_get_an_answer(words in prop::collection::vec(0usize..PIECES.len(), 0..40)) {
        let text: String = words.into_iter().map(|i| format!("{} ", PIECES[i])).collect();
        job("x.sh", &text, &[]).ok();
        job("x.sh", &format!("torchrun pretrain_gpt.py {text}"), &[]).ok();
    }
}

fn unknown<'a>(reading: &'a Reading, name: &str) -> &'a jobs::Note {
    let found = reading.notes.iter().find(|n| n.name == name);
    found.unwrap_or_else(|| panic!("{name} is not among {:?}", reading.notes))
}

#[test]
fn offload_says_where_states_rest() {
    use ir::program::Space;
    let with = |zero: &str| {
        let text =
            format!(r#"{{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {zero}}}"#);
        let reading = job("ds.json", &text, &[]).unwrap();
        let o = reading.job.offload;
        (o.optimizer, o.gradients, o.parameters)
    };
    let host = Some(Space::Host);
    let optimizer = r#""offload_optimizer": {"device": "cpu"}"#;
    assert_eq!(
        with(&format!(r#"{{"stage": 2, {optimizer}}}"#)),
        (host, host, None)
    );
    assert_eq!(
        with(&format!(r#"{{"stage": 1, {optimizer}}}"#)),
        (host, None, None)
    );
    let parameters = r#""offload_param": {"device": "nvme"}"#;
    let both = format!(r#"{{"stage": 3, {optimizer}, {parameters}}}"#);
    assert_eq!(with(&both), (host, host, Some(Space::File)));
    // Parameters are whole below level 3, and stay where they are.
    assert_eq!(
        with(&format!(r#"{{"stage": 2, {parameters}}}"#)),
        (None, None, None)
    );
    assert_eq!(
        with(r#"{"stage": 2, "offload_optimizer": {"device": "none"}}"#),
        (None, None, None)
    );
    let titan = TITAN.replace("[training]", "[training]\nenable_cpu_offload = true");
    let reading = job("t.toml", &titan, &[]).unwrap();
    assert_eq!(reading.job.offload.optimizer, host);
}

#[test]
fn a_setting_that_nothing_uses_is_told() {
    let reading = job("train.sh", SCRIPT, &[("NNODES", "2"), ("NNODE", "4")]).unwrap();
    let note = unknown(&reading, "--set NNODE");
    assert_eq!(
        note.words,
        "nothing in the job uses it; did you mean `NNODES`?"
    );
    assert!(!reading.notes.iter().any(|n| n.name == "--set NNODES"));
    let reading = job("ds.json", DEEPSPEED, &[("gradient_checkpoint", "true")]).unwrap();
    let note = unknown(&reading, "--set gradient_checkpoint");
    assert_eq!(note.meant(), Some("`gradient_checkpointing`"));
}

#[test]
fn slips_of_names_have_a_suggestion_and_their_place() {
    let script = SLURM.replace("--sequence-parallel", "--seqence-parallel");
    assert_ne!(script, SLURM);
    let reading = job("job.sbatch", &script, &[]).unwrap();
    let note = unknown(&reading, "--seqence-parallel");
    assert_eq!(note.meant(), Some("`--sequence-parallel`"));
    assert!(note.line.is_some());

    let text = "{\n\"train_micro_batch_size_per_gpu\": 1,\n\"zero_optimization\": {\"stage\": 2,\n\"reduce_bucket\": 5,\n\"overlap_com\": true},\n\"mine\": {\"deep\": {\n\"stage\": 1}},\n\"empty\": {}\n}";
    let reading = job("ds.json", text, &[]).unwrap();
    let place = |name: &str| unknown(&reading, name).line;
    assert_eq!(place("zero_optimization.overlap_com"), Some(5));
    assert_eq!(place("mine.deep.stage"), Some(7));
    assert_eq!(place("empty"), Some(8));
    let meant = unknown(&reading, "zero_optimization.overlap_com").meant();
    assert_eq!(meant, Some("`zero_optimization.overlap_comm`"));

    let titan = format!("{TITAN}\n[mine]\nsteps = 3\n[other]\n");
    let line = titan.lines().position(|l| l == "steps = 3").unwrap() + 1;
    let titan = titan.replace("tensor_parallel_degree", "tensor_paralel_degree");
    let reading = job("t.toml", &titan, &[]).unwrap();
    assert_eq!(unknown(&reading, "mine.steps").line, Some(line));
    unknown(&reading, "other");
    let note = unknown(&reading, "parallelism.tensor_paralel_degree");
    assert_eq!(note.meant(), Some("`parallelism.tensor_parallel_degree`"));
}

#[test]
fn a_model_of_the_trainers_arguments_is_the_jobs() {
    let script = "deepspeed --num_gpus 8 train.py --deepspeed ds.json --model_name_or_path meta-llama/Llama-3.1-8B\n";
    let open = |_: &str| Ok(DEEPSPEED.to_string());
    let reading = read("train.sh", script, &Given::default(), &open).unwrap();
    let named = Model::Named {
        name: "meta-llama/Llama-3.1-8B".into(),
        argument: "--model_name_or_path".into(),
    };
    assert_eq!(reading.job.model, named);
}

#[test]
fn formats_that_are_switched_off_are_no_part_of_the_job() {
    let off = "\n[float8]\nenabled = false\nenable_fsdp_float8_all_gather = true\n[fault_tolerance]\nenable = false\n";
    let reading = job("t.toml", &format!("{TITAN}{off}"), &[]).unwrap();
    let open = names(&reading, NoteKind::NotModelled);
    let of_format = |n: &&str| n.starts_with("float8.") || n.starts_with("fault");
    assert!(!open.iter().any(of_format), "{open:?}");
    let on = format!("{TITAN}{off}").replace("[model]", "[model]\nconverters = [\"float8\"]");
    let reading = job("t.toml", &on, &[]).unwrap();
    let open = names(&reading, NoteKind::NotModelled);
    assert!(
        open.contains(&"float8.enable_fsdp_float8_all_gather"),
        "{open:?}"
    );
}

#[test]
fn files_that_are_no_jobs_are_told_so() {
    for (file, text, what) in [
        ("empty.sh", " \n\n", "the file is empty"),
        (
            "README.md",
            "# A model's notes (unclosed\n",
            "it is a document",
        ),
    ] {
        let e = job(file, text, &[]).unwrap_err();
        assert!(e.problem.contains(what), "{e}");
        assert!(e.help.starts_with("a job is a script with"), "{}", e.help);
    }
}

/// Megatron-LM sums and sends gradients in f32 with --bf16 unless it is asked not to; Megatron-FSDP in
/// the parameters' type, with flags of its own.
#[test]
fn types_of_gradients_are_those_of_the_flags() {
    let base = "pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 \
        --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 --vocab-size 256 --bf16 \
        --overlap-grad-reduce --overlap-param-gather --use-distributed-optimizer";
    let options = |more: &str| {
        let script = format!("torchrun --nproc_per_node 8 {base} {more}\n");
        let reading = job("train.sh", &script, &[]).unwrap();
        let left_out = names(&reading, NoteKind::NotModelled);
        let of_sums = ["--grad-reduce-in-bf16", "--megatron-fsdp-main-grads-dtype"];
        let said = of_sums.iter().any(|name| left_out.contains(name));
        (reading.job.options.join(" "), said)
    };
    let narrow = ("grads-bf16".to_string(), true);
    let sent = ("grads-sent-bf16".to_string(), false);
    let wide = (String::new(), false);
    assert_eq!(options(""), wide);
    assert_eq!(options("--accumulate-allreduce-grads-in-fp32"), wide);
    assert_eq!(options("--grad-reduce-in-bf16"), narrow);
    let local = "--ddp-param-name-patterns-for-fp32-local-accumulation all";
    assert_eq!(options(&format!("--grad-reduce-in-bf16 {local}")), sent);
    let fsdp = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params \
        --ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion";
    assert_eq!(options(fsdp), narrow);
    let wide_sums = format!("{fsdp} --megatron-fsdp-main-grads-dtype fp32");
    assert_eq!(options(&wide_sums), wide);
    assert_eq!(
        options(&format!("{wide_sums} --megatron-fsdp-grad-comm-dtype bf16")),
        sent
    );
}

/// NullTokenizer had one token more than it is told until Megatron-Core 0.18.
#[test]
fn tokens_of_a_null_tokenizer_are_counted_as_megatron_counts_them() {
    let of = |kind: &str, n: u64, is_older: bool| {
        let script = format!(
            "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 64 \
             --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 \
             --micro-batch-size 1 --global-batch-size 8 --tensor-model-parallel-size 2 \
             --tokenizer-type {kind} --vocab-size {n}\n"
        );
        let given = Given {
            is_older,
            ..Given::default()
        };
        let reading = jobs::read("train.sh", &script, &given, &no_file).unwrap();
        let Model::Config(config) = &reading.job.model else {
            panic!("{:?}", reading.job.model);
        };
        let is_said = names(&reading, NoteKind::Assumed).contains(&"--vocab-size");
        (
            config["vocab_size"].as_u64(),
            reading.job.vocab_multiple,
            is_said,
        )
    };
    // 128 rows for each of two tensor ranks: one token more would be 256 rows more.
    assert_eq!(
        of("NullTokenizer", 50_176, false),
        (Some(50_176), 256, true)
    );
    assert_eq!(
        of("NullTokenizer", 50_176, true),
        (Some(50_177), 256, false)
    );
    assert_eq!(
        of("NullTokenizer", 50_257, false),
        (Some(50_257), 256, false)
    );
    assert_eq!(
        of("NullMultimodalTokenizer", 256, false),
        (Some(257), 256, false)
    );
    assert_eq!(
        of("GPT2BPETokenizer", 50_176, true),
        (Some(50_176), 256, false)
    );
}
