//! `schema`: the JSON Schema of a document, generated from its type.

use crate::args::{Document, SchemaArgs};
use crate::failure::Failure;
use crate::report;
use ir::cluster::Cluster;
use ir::measurement::Measurement;
use ir::plan::Plan;
use schemars::schema_for;

pub fn run(args: &SchemaArgs) -> Result<(), Failure> {
    report::print_json(&match args.document {
        Document::Plan => schema_for!(Plan),
        Document::Run => schema_for!(Measurement),
        Document::Cluster => schema_for!(Cluster),
    })
}
