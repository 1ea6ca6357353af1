(** Finite sums, inner product and norms over Coq's real numbers.

    The sums are MathComp's big operators; they ask of the reals only the laws of addition and
    multiplication, so no further structure (and no further axiom) is put on R. *)
From Coq Require Import Reals Lra FunctionalExtensionality.
From mathcomp Require Import all_ssreflect.
Set Implicit Arguments.
Unset Strict Implicit.
Unset Printing Implicit Defensive.
Local Open Scope R_scope.

(** The laws that MathComp's lemmas on big operators look up. *)
Lemma Rplus_associative : associative Rplus.
Proof. by move=> a b c; rewrite Rplus_assoc. Qed.

Lemma Rmult_associative : associative Rmult.
Proof. by move=> a b c; rewrite Rmult_assoc. Qed.

Lemma Rmult_left_distributive : left_distributive Rmult Rplus.
Proof. by move=> a b c; rewrite Rmult_plus_distr_r. Qed.

Lemma Rmult_right_distributive : right_distributive Rmult Rplus.
Proof. by move=> a b c; rewrite Rmult_plus_distr_l. Qed.

Canonical Rplus_law := Monoid.Law Rplus_associative Rplus_0_l Rplus_0_r.
Canonical Rplus_comlaw := Monoid.ComLaw Rplus_comm.
Canonical Rmult_mullaw := Monoid.MulLaw Rmult_0_l Rmult_0_r.
Canonical Rplus_addlaw := Monoid.AddLaw Rmult_left_distributive Rmult_right_distributive.

Notation "\sum_ ( i 'in' A ) F" := (\big[Rplus/0]_(i in A) F) : R_scope.
Notation "\sum_ ( i | P ) F" := (\big[Rplus/0]_(i | P) F) : R_scope.
Notation "\sum_ ( i < n ) F" := (\big[Rplus/0]_(i < n) F) : R_scope.
Notation "\sum_ ( i <- s ) F" := (\big[Rplus/0]_(i <- s) F) : R_scope.
Notation "\sum_ i F" := (\big[Rplus/0]_i F) : R_scope.

(** The converse of the library's [Rabs_le]. *)
Lemma abs_le_bounds a b : Rabs a <= b -> - b <= a <= b.
Proof. by rewrite /Rabs; case: Rcase_abs => *; lra. Qed.

Section Sums.
Variable I : finType.
Implicit Types (P : pred I) (F G : I -> R).

Lemma sum_ge0 P F : (forall i, P i -> 0 <= F i) -> 0 <= \sum_(i | P i) F i.
Proof. by move=> F0; elim/big_ind: _ => //; [lra | move=> a b; lra]. Qed.

Lemma sum_le P F G : (forall i, P i -> F i <= G i) -> \sum_(i | P i) F i <= \sum_(i | P i) G i.
Proof. by move=> FG; elim/big_ind2: _ => //; [lra | move=> a b c d; lra]. Qed.

(** A sum of non-negative terms is at least each of them. *)
Lemma sum_ge_term P F i : P i -> (forall j, P j -> 0 <= F j) -> F i <= \sum_(j | P j) F j.
Proof.
move=> Pi F0; rewrite (bigD1 i) //=.
suff : 0 <= \sum_(j | P j && (j != i)) F j by lra.
by apply: sum_ge0 => j /andP[Pj _]; apply: F0.
Qed.

Lemma sum_scale c P F : \sum_(i | P i) c * F i = c * \sum_(i | P i) F i.
Proof. by rewrite big_distrr. Qed.

Lemma sum_scale_r c P F : \sum_(i | P i) F i * c = (\sum_(i | P i) F i) * c.
Proof. by rewrite big_distrl. Qed.

Lemma sum_opp P F : \sum_(i | P i) - F i = - (\sum_(i | P i) F i).
Proof.
have -> : - (\sum_(i | P i) F i) = (-1) * \sum_(i | P i) F i by lra.
by rewrite -sum_scale; apply: eq_bigr => i _; lra.
Qed.

Lemma sum_minus P F G :
  \sum_(i | P i) (F i - G i) = \sum_(i | P i) F i - \sum_(i | P i) G i.
Proof. by rewrite /Rminus big_split /= sum_opp. Qed.

(** The largest value of a non-negative family; 0 for an empty one. *)
Definition max_over (A : {set I}) F : R := \big[Rmax/0]_(i in A) F i.

Lemma max_over_ge (A : {set I}) F i : i \in A -> F i <= max_over A F.
Proof.
rewrite /max_over -big_filter => iA.
have : i \in [seq j <- index_enum I | j \in A] by rewrite mem_filter iA mem_index_enum.
elim: [seq _ <- _ | _] => // j s IH; rewrite inE big_cons => /orP[/eqP->|/IH Fi].
  exact: Rmax_l.
by apply: Rle_trans Fi (Rmax_r _ _).
Qed.

Lemma max_over_le (A : {set I}) F c :
  0 <= c -> (forall i, i \in A -> F i <= c) -> max_over A F <= c.
Proof. by move=> c0 Fc; apply: (big_ind (fun a => a <= c)) => // a b *; apply: Rmax_lub. Qed.

(** So that [max_over] may be read as "max": it is one of the values. *)
Lemma max_over_attained (A : {set I}) F :
  A != set0 -> (forall i, i \in A -> 0 <= F i) -> exists2 i, i \in A & max_over A F = F i.
Proof.
case/set0Pn=> i0 i0A F0.
have : max_over A F = 0 \/ exists2 i, i \in A & max_over A F = F i.
  rewrite /max_over; apply: (big_ind (fun a => a = 0 \/ exists2 i, i \in A & a = F i)).
  - by left.
  - by move=> a b; rewrite /Rmax; case: Rle_dec.
  - by move=> i iA; right; exists i.
case=> // max0; exists i0 => //.
have := F0 i0 i0A; have := max_over_ge F i0A; lra.
Qed.

End Sums.

(** Vectors of R^n are functions on the n coordinates. *)
Definition vec (n : nat) := 'I_n -> R.

Definition add_vec n (a b : vec n) : vec n := fun j => a j + b j.
Definition sub_vec n (a b : vec n) : vec n := fun j => a j - b j.
Definition scale_vec n (c : R) (a : vec n) : vec n := fun j => c * a j.
Definition dot n (a b : vec n) : R := \sum_j a j * b j.
Definition norm n (a : vec n) : R := sqrt (dot a a).

Section Vectors.
Variable n : nat.
Implicit Types (a b : vec n) (c : R).

Lemma dotC a b : dot a b = dot b a.
Proof. by apply: eq_bigr => j _; rewrite Rmult_comm. Qed.

Lemma dot_addr a b d : dot a (add_vec b d) = dot a b + dot a d.
Proof. by rewrite -big_split; apply: eq_bigr => j _; rewrite /add_vec /=; lra. Qed.

Lemma dot_subr a b d : dot a (sub_vec b d) = dot a b - dot a d.
Proof. by rewrite -sum_minus; apply: eq_bigr => j _; rewrite /sub_vec; lra. Qed.

Lemma dot_scaler c a b : dot a (scale_vec c b) = c * dot a b.
Proof. by rewrite -sum_scale; apply: eq_bigr => j _; rewrite /scale_vec; lra. Qed.

Lemma dot_ge0 a : 0 <= dot a a.
Proof. by apply: sum_ge0 => j _; nra. Qed.

Lemma norm_ge0 a : 0 <= norm a.
Proof. exact: sqrt_pos. Qed.

Lemma norm_sqr a : norm a * norm a = dot a a.
Proof. exact/sqrt_sqrt/dot_ge0. Qed.

Lemma dot_gt0 a j : a j <> 0 -> 0 < dot a a.
Proof.
move=> aj; have : a j * a j <= dot a a.
  by apply: (@sum_ge_term _ xpredT (fun j => a j * a j)) => // i _; nra.
by nra.
Qed.

(** |c a - d b|^2 >= 0 with c = b.b and d = a.b is Cauchy-Schwarz times b.b. *)
Lemma cauchy_schwarz_sqr a b : dot a b * dot a b <= dot a a * dot b b.
Proof.
have [b0|b0] := Req_dec (dot b b) 0; last first.
  have bb : 0 < dot b b by have := dot_ge0 b; lra.
  have := dot_ge0 (sub_vec (scale_vec (dot b b) a) (scale_vec (dot a b) b)).
  rewrite dot_subr !dot_scaler ![dot (sub_vec _ _) _]dotC !dot_subr !dot_scaler (dotC b a).
  by nra.
have -> : dot a b = 0.
  rewrite /dot big1 // => j _; have [->|bj] := Req_dec (b j) 0; first lra.
  by have := dot_gt0 bj; lra.
by rewrite b0; lra.
Qed.

Lemma cauchy_schwarz a b : Rabs (dot a b) <= norm a * norm b.
Proof.
apply: Rsqr_incr_0_var; last by apply: Rmult_le_pos; apply: norm_ge0.
rewrite -Rsqr_abs /Rsqr; have := cauchy_schwarz_sqr a b.
by have := norm_sqr a; have := norm_sqr b; nra.
Qed.

(** The two laws of a norm that the error bounds use. *)
Definition is_norm (nrm : vec n -> R) : Prop :=
  (forall a b, nrm (add_vec a b) <= nrm a + nrm b) /\
  (forall c a, nrm (scale_vec c a) = Rabs c * nrm a).

Lemma is_norm_ge0 nrm a : is_norm nrm -> 0 <= nrm a.
Proof.
case=> tri hom; have := tri a (scale_vec (-1) a); rewrite hom Rabs_left; last lra.
have -> : add_vec a (scale_vec (-1) a) = scale_vec 0 a.
  by apply: functional_extensionality => j; rewrite /add_vec /scale_vec; lra.
by rewrite hom Rabs_R0; lra.
Qed.

Lemma is_norm0 nrm : is_norm nrm -> nrm (fun=> 0) = 0.
Proof.
case=> _ hom; have zero : scale_vec 0 (fun=> 0) = (fun=> 0) :> vec n.
  by apply: functional_extensionality => j; rewrite /scale_vec; lra.
by have := hom 0 (fun=> 0); rewrite zero Rabs_R0; lra.
Qed.

(** A norm of a sum is at most the sum of the norms. *)
Lemma is_norm_sum nrm (I : finType) (P : pred I) (v : I -> vec n) :
  is_norm nrm -> nrm (fun j => \sum_(i | P i) v i j) <= \sum_(i | P i) nrm (v i).
Proof.
move=> nrmP; rewrite -(big_filter _ P (fun i => nrm (v i))).
have -> : (fun j => \sum_(i | P i) v i j) =
          (fun j => \sum_(i <- [seq i <- index_enum I | P i]) v i j).
  by apply: functional_extensionality => j; rewrite big_filter.
elim: [seq _ <- _ | _] => [|i s IH].
  rewrite big_nil; have -> : (fun j => \sum_(i <- [::]) v i j) = (fun=> 0).
    by apply: functional_extensionality => j; rewrite big_nil.
  by rewrite is_norm0 //; lra.
rewrite big_cons; have -> : (fun j => \sum_(i' <- i :: s) v i' j) =
                            add_vec (v i) (fun j => \sum_(i' <- s) v i' j).
  by apply: functional_extensionality => j; rewrite big_cons.
by have [tri _] := nrmP; apply: Rle_trans (tri _ _) _; lra.
Qed.

(** The Euclidean norm obeys them, so nothing that assumes [is_norm] is empty. *)
Lemma norm_is_norm : is_norm (@norm n).
Proof.
split=> [a b | c a].
  apply: Rsqr_incr_0_var; last by have := norm_ge0 a; have := norm_ge0 b; lra.
  rewrite /Rsqr norm_sqr dot_addr ![dot (add_vec _ _) _]dotC !dot_addr (dotC b a).
  have := cauchy_schwarz a b; have := Rle_abs (dot a b).
  by have := norm_sqr a; have := norm_sqr b; nra.
rewrite /norm dot_scaler dotC dot_scaler -Rmult_assoc sqrt_mult; first 1 last.
- by nra.
- exact: dot_ge0.
by rewrite sqrt_Rsqr_abs.
Qed.

End Vectors.
